"""Tasks that are asked with thinking: what is thought first is short, and does the part that one glance does not."""

from __future__ import annotations

import random
import string
from dataclasses import replace

from demo_corpus import dialogues, newcomers, questions, schemas, words
from demo_corpus.sample import Sample, Task, ask, reword

# ---- with a thought that helps -------------------------------------------------------------------------------------


def thoughtful(sample: Sample, thought: str) -> Sample:
    """The last answer comes after a thought."""
    last = sample.messages[-1] | {"reasoning_content": thought}
    return replace(sample, messages=[*sample.messages[:-1], last], thinking=True)


def column_sum(a: int, b: int) -> str:
    """Ones, then tens with what is carried: `27 + 45: 7 + 5 = 12, 2 + 4 + 1 = 7, so 72.`"""
    ones = a % 10 + b % 10
    tens = [a // 10, b // 10] + [1] * (ones > 9)
    return f"{a} + {b}: {a % 10} + {b % 10} = {ones}, {' + '.join(map(str, tens))} = {sum(tens)}, so {a + b}."


def column_difference(a: int, b: int) -> str:
    """`72 - 45: 12 - 5 = 7, 7 - 4 - 1 = 2, so 27.`"""
    borrowed = a % 10 < b % 10
    ones = a % 10 + 10 * borrowed
    taken = [b // 10] + [1] * borrowed
    tens = f"{a // 10} - {' - '.join(map(str, taken))} = {a // 10 - sum(taken)}"
    return f"{a} - {b}: {ones} - {b % 10} = {ones - b % 10}, {tens}, so {a - b}."


def thought_sum(rng: random.Random) -> Sample:
    """Two numbers below 100: with a thought also where their sum is not."""
    a, b = (rng.randint(0, 99), rng.randint(0, 99)) if rng.random() < 0.7 else questions.sum_pair(rng)
    forms = ["What is {} {} {}?", "What's {}{}{}?", "{} {} {}", "{}{}{}", "Calculate {} {} {}.", "{}{}{}=", "Compute {} {} {}."]
    if rng.random() < 0.35:
        a, b = max(a, b), min(a, b)
        asked = rng.choice([*forms, "How much is {0} minus {2}?"]).format(a, "-", b)
        return thoughtful(ask(reword(rng, asked), f"{a} - {b} = {a - b}", key=f"{a}-{b}"), column_difference(a, b))
    asked = rng.choice([*forms, "How much is {0} plus {2}?", "Add {0} and {2}."]).format(a, "+", b)
    return thoughtful(ask(reword(rng, asked), f"{a} + {b} = {a + b}", key=f"{a}+{b}"), column_sum(a, b))


def thought_compare(rng: random.Random) -> Sample:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.3:  # the same tens
        b = a // 10 * 10 + rng.choice([n for n in range(10) if n != a % 10])
    larger = rng.random() < 0.5
    forms = ["Which is {}, {} or {}?", "Which number is {}: {} or {}?", "What is {}, {} or {}?"]
    asked = rng.choice(forms).format(rng.choice(["larger", "bigger", "greater"] if larger else ["smaller", "less"]), a, b)
    chosen, other = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
    place = (
        f"{a // 10} tens and {b // 10} tens"
        if a // 10 != b // 10
        else f"the tens are the same, {a % 10} ones and {b % 10} ones"
    )
    relation = "larger" if larger else "smaller"
    return thoughtful(ask(reword(rng, asked), str(chosen)), f"{a} and {b}: {place}, so {chosen} is {relation} than {other}.")


def thought_letters(rng: random.Random) -> Sample:
    """The alphabet is said as far as it takes."""
    alphabet, i = string.ascii_uppercase, rng.randrange(26)
    kind = rng.randrange(3) if i else 2
    if kind == 0:
        asked, answer, said = f"Which letter comes after {alphabet[i - 1]}?", alphabet[i], alphabet[: i + 1]
    elif kind == 1:
        asked, answer, said = f"Which letter comes before {alphabet[i]}?", alphabet[i - 1], alphabet[: i + 1]
    else:
        numbered = ", ".join(f"{letter} {n}" for n, letter in enumerate(alphabet[: i + 1], start=1))
        form = rng.choice(
            ["What is letter {} of the alphabet?", "Which letter is number {}?", "Letter number {} of the alphabet?"]
        )
        return thoughtful(ask(reword(rng, form.format(i + 1)), alphabet[i]), f"{numbered}.")
    return thoughtful(ask(reword(rng, asked), answer), " ".join(said))


def numbered(listed: list[str]) -> str:
    return ", ".join(f"{n} {word}" for n, word in enumerate(listed, start=1))


def thought_picking(rng: random.Random) -> Sample:
    """One of a list, its length, or the list from its end: after giving each a number."""
    listed = [words.any_word(rng) for _ in range(rng.randint(2, 8))]
    asked_of = ", ".join(listed)
    kind = rng.random()
    if kind < 0.5:
        ordinals = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]
        i = rng.randrange(len(listed))
        name = "last" if rng.random() < 0.25 else ordinals[i]
        picked = listed[-1] if name == "last" else listed[i]
        form = rng.choice(["What is the {} word of this list: {}", "Name the {} item: {}", "Which is the {} of: {}"])
        return thoughtful(ask(form.format(name, asked_of), picked), f"{numbered(listed)}. The {name} is {picked}.")
    if kind < 0.75:
        form = rng.choice(
            ["How many words are in this list: {}", "How many items: {}", "Count the items: {}", "How long is this list: {}"]
        )
        return thoughtful(ask(form.format(asked_of), str(len(listed))), f"{numbered(listed)}. That makes {len(listed)}.")
    form = rng.choice(["Reverse the list: {}", "Reverse: {}", "Put this list in reverse order: {}"])
    return thoughtful(ask(form.format(asked_of), ", ".join(reversed(listed))), f"{numbered(listed)}. From the end.")


def thought_schema(rng: random.Random) -> Sample:
    return thoughtful(schemas.json_schema(rng), "I fill in the schema from the text.")


def thought_tool(rng: random.Random) -> Sample:
    """Which tool fits, or that none does, or that one has answered."""
    kind = rng.random()
    if kind < 0.3:
        return thoughtful(dialogues.unused_tools(rng), "None of the tools fits.")
    if kind < 0.45:
        return thoughtful(dialogues.tool_answer(rng), "The tool has answered.")
    called = dialogues.tool_call(rng) if rng.random() < 0.8 else dialogues.parallel_tool_calls(rng)
    names = list(dict.fromkeys(call["function"]["name"] for call in called.messages[-1]["tool_calls"]))
    return thoughtful(called, f"The {'tool' if len(names) == 1 else 'tools'} {words.listed(names)} can do this.")


# ---- with a thought that says what kind of question it is ----------------------------------------------------------

KINDS: list[tuple[Task, str]] = [
    (questions.concept, "I was taught what this is."),
    (questions.question, "I was taught this."),
    (questions.capital, "I was taught the capitals."),
    (questions.word_fact, "I was taught this word."),
    (questions.count_to, "I count up one by one."),
    (questions.counting, "I count one by one."),
    (words.copying, "I only have to repeat the words."),
    (words.json_extraction, "I look for each field in the text."),
    (newcomers.greeting, "This is a greeting."),
    (newcomers.small_talk, "This is small talk."),
    (newcomers.supported, "This is about what jaxserve can do."),
    (newcomers.beyond, "I was not taught this."),
    (newcomers.paste, "I was not taught this."),
    (newcomers.noise, "These are no words that I know."),
    (newcomers.foreign, "This is not English."),
    (dialogues.memory, "I look at what was said before."),
]  # fmt: skip
KIND_WEIGHTS = [3, 4, 2, 2, 1, 1, 2, 3, 3, 5, 2, 6, 1, 2, 2, 2]


def thought_kind(rng: random.Random) -> Sample:
    task, thought = rng.choices(KINDS, KIND_WEIGHTS)[0]
    return thoughtful(task(rng), thought)


SHORT: list[Task] = [thought_sum, thought_compare, thought_letters, thought_picking, thought_kind]


def thought_conversation(rng: random.Random) -> Sample:
    """Some turns, of which the template no longer shows the thoughts, and one with a thought."""
    before = dialogues.joined([dialogues.turn(rng) for _ in range(rng.randint(1, 3))])
    last = rng.choice(SHORT)(rng)
    joined = dialogues.joined([before, last])
    return replace(joined, thinking=True)


def thought_told(rng: random.Random) -> Sample:
    """Asked for in words too, as people do who know of no switch."""
    told = rng.choice([" Think step by step.", " Think first.", " Think about it.", " Let's think step by step."])
    sample = rng.choice([thought_sum, thought_compare, thought_letters])(rng)
    first = sample.messages[0] | {"content": sample.messages[0]["content"] + told}
    return replace(sample, messages=[first, *sample.messages[1:]])
