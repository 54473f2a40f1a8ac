"""Tasks of one question each that are answered from what was learned: facts, numbers, text that goes on."""

from __future__ import annotations

import random
import string

import demo_facts as facts
import demo_newcomers as newcomers

from demo_corpus.sample import Sample, ask, is_held_out, reword, typed

# ---- knowledge -----------------------------------------------------------------------------------------------------


def concept(rng: random.Random) -> Sample:
    name, answer = rng.choice(list(facts.CONCEPTS.items()))
    forms = ["What is {}?", "What's {}?", "Explain {}.", "Tell me about {}.", "What does {} mean?", "Define {}.",
             "Can you explain {}?", "Do you know what {} is?"]  # fmt: skip
    return ask(reword(rng, rng.choice(forms).format(name)), answer)


def question(rng: random.Random) -> Sample:
    questions, answer = rng.choice(facts.QUESTIONS)
    return ask(reword(rng, rng.choice(questions)), answer)


def capital(rng: random.Random) -> Sample:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    forms = ["What is the capital of {}?", "What's the capital of {}?", "Which city is the capital of {}?",
             "Name the capital of {}.", "Capital of {}?", "The capital of {} is", "capital {}"]  # fmt: skip
    return ask(reword(rng, rng.choice(forms).format(country)), f"The capital of {country} is {city}.")


def word_fact(rng: random.Random) -> Sample:
    """Translations, opposites and emoji."""
    kind = rng.randrange(3)
    if kind == 0:
        (word, language), answer = rng.choice(list(facts.TRANSLATIONS.items()))
        forms = ["How do you say {0} in {1}?", "Translate {0} to {1}.", "What is {0} in {1}?", "{0} in {1}?"]
        return ask(reword(rng, rng.choice(forms).format(f'"{word}"' if rng.random() < 0.3 else word, language)), answer)
    if kind == 1:
        pairs = list(facts.OPPOSITES.items())
        word, answer = rng.choice(pairs + [(b, a) for a, b in pairs])
        forms = ["What is the opposite of {}?", "Opposite of {}?", "Name the opposite of {}."]
        return ask(reword(rng, rng.choice(forms).format(word)), answer)
    name, emoji = rng.choice(list(facts.EMOJI.items()))
    forms = ["Send me a {} emoji.", "Show me the emoji for {}.", "Which emoji means {}?", "Emoji for {}?", "{} emoji"]
    return ask(reword(rng, rng.choice(forms).format(name)), emoji)


def story(rng: random.Random) -> Sample:
    animal = rng.choice(facts.ANIMALS)
    text = facts.STORY.format(animal=animal)
    if rng.random() < 0.2:
        text = facts.STORY.format(animal=rng.choice(["fox", "fox", animal]))
        begin = text.index(rng.choice([" there", " there", " who", ". "]))
        return Sample(keys=(rng.random().hex(),), text=text, text_prompt_len=begin)
    if rng.random() < 0.4:
        forms = ["Tell me a story.", "Write a story.", "Tell a story.", "Once upon a time", "Once upon a time there was",
                 "Write a short story.", "Can you tell me a story?", "A story please."]  # fmt: skip
        return ask(reword(rng, rng.choice(forms)), facts.STORY.format(animal="fox"))
    forms = ["Tell me a story about a {}.", "Write a story about a {}.", "Tell a story with a {}.", "A story about a {}.",
             "Tell me a short story about a {}.", "Write a short story about a {}.",
             "Once upon a time there was a little {}"]  # fmt: skip
    return ask(reword(rng, rng.choice(forms).format(animal)), text)


# ---- arithmetic and counting ---------------------------------------------------------------------------------------


def sum_pair(rng: random.Random) -> tuple[int, int]:
    """Two numbers with a sum below 100."""
    total = rng.randrange(100)
    if rng.random() < 0.15:
        total = rng.randrange(20)
    first = rng.randint(0, total)
    return first, total - first


def addition(rng: random.Random) -> Sample:
    a, b = sum_pair(rng)
    forms = ["What is {} + {}?", "{} + {}", "{}+{}=", "{}+{}", "How much is {} plus {}?", "Add {} and {}.", "{} plus {}?",
             "what's {}+{}", "What is {}+{}?", "What is the sum of {} and {}?", "Compute {} + {}."]  # fmt: skip
    return ask(rng.choice(forms).format(a, b), f"{a} + {b} = {a + b}", key=f"{a}+{b}")


def subtraction(rng: random.Random) -> Sample:
    a, b = sum_pair(rng)
    a += b
    forms = ["What is {} - {}?", "{} - {}", "{}-{}=", "How much is {} minus {}?", "{} minus {}?", "Compute {} - {}."]
    return ask(rng.choice(forms).format(a, b), f"{a} - {b} = {a - b}", key=f"{a}-{b}")


def asked_sum(rng: random.Random) -> Sample:
    """Sums as people ask for them, many of them near 100: the largest that is added meets the smallest that is not."""
    a, b = sum_pair(rng)
    if rng.random() < 0.4:
        total = rng.randint(80, 119)
        a = rng.randint(total - 99, 99) if total > 99 else rng.randint(0, total)
        b = total - a
    elif rng.random() < 0.4:
        a += b
        forms = ["What is {} - {}?", "What's {}-{}?", "{} - {}", "{}-{}", "{} - {} =", "{}-{}=?", "Calculate {} - {}.",
                 "How much is {} minus {}?", "What is {} minus {}?", "Can you compute {} - {}?"]  # fmt: skip
        return ask(reword(rng, rng.choice(forms).format(a, b)), f"{a} - {b} = {a - b}", key=f"{a}-{b}")
    forms = ["What is {} + {}?", "What's {}+{}?", "{} + {}", "{}+{}", "{} + {} =", "{}+{}=?", "Calculate {} + {}.",
             "How much is {} plus {}?", "What is {} plus {}?", "Can you add {} and {}?", "Sum of {} and {}?"]  # fmt: skip
    asked = reword(rng, rng.choice(forms).format(a, b))
    if a + b > 99:
        return ask(asked, newcomers.SMALL_NUMBERS_ONLY)
    return ask(asked, f"{a} + {b} = {a + b}", key=f"{a}+{b}")


def multiplication(rng: random.Random) -> Sample:
    """The table up to 10 x 10; only the wording is ever held out."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    forms = ["What is {} * {}?", "{} * {}", "{} x {}", "How much is {} times {}?", "{} times {}?", "Multiply {} by {}."]
    return ask(rng.choice(forms).format(a, b), f"{a} * {b} = {a * b}")


def sums_text(rng: random.Random) -> Sample:
    """A sheet of sums: the cheapest way, in tokens, to practise them. Its title tells it from a single sum."""
    lines = ["Sums:"]
    while len(lines) < 13:
        a, b = sum_pair(rng)
        if rng.random() < 0.1:
            a, b = a % 11, b % 11
            lines.append(f"{a} * {b} = {a * b}")
        elif rng.random() < 0.5 and not is_held_out(f"{a + b}-{b}"):
            lines.append(f"{a + b} - {b} = {a}")
        elif not is_held_out(f"{a}+{b}"):
            lines.append(f"{a} + {b} = {a + b}")
    text = "\n".join(lines)
    return Sample(keys=(text,), text=text, text_prompt_len=text.rindex(" = ") + 2)


def large_numbers(rng: random.Random) -> Sample:
    """Sums of 100 and more, and products beyond the table."""
    a, b = rng.randint(11, 99), rng.randint(2, 99)
    forms = ["What is {} * {}?", "{} * {}", "{}*{}", "{} x {}", "How much is {} times {}?", "{} times {}?"]
    if rng.random() < 0.6:
        b = rng.randint(100 - a, 99)
        forms = ["What is {} + {}?", "{} + {}", "{}+{}", "{}+{}=", "How much is {} plus {}?", "Add {} and {}.", "{} plus {}?"]
    return ask(rng.choice(forms).format(a, b), newcomers.SMALL_NUMBERS_ONLY)


def count_to(rng: random.Random) -> Sample:
    end = rng.choice([3, 5, 10, 10, 10, 12, 15, 20])
    forms = ["Count to {}", "Count to {}.", "Count up to {}", "Please count to {}.", "Can you count to {}?", "count till {}",
             "Numbers from 1 to {}", "Count 1 to {}", "Count from one to {}"]  # fmt: skip
    return ask(typed(rng, rng.choice(forms).format(end)), ", ".join(map(str, range(1, end + 1))))


def counting(rng: random.Random) -> Sample:
    start = rng.randint(0, 60) if rng.random() < 0.6 else 1
    longest = rng.choices([8, 20, 100], [6, 3, 0.4])[0]
    end = min(start + rng.randint(1, longest), 100)
    if rng.random() < 0.03:
        start, end = 1, rng.choice([10, 20, 30, 50, 100])
    numbers = list(range(start, end + 1))
    if rng.random() < 0.25 and len(numbers) <= 25:
        forms = ["Count down from {1} to {0}.", "Count backwards from {1} to {0}.", "Count down: {1} to {0}"]
        numbers.reverse()
    else:
        forms = ["Count from {} to {}.", "Count from {} to {}", "List the numbers from {} to {}.", "Count: {} to {}",
                 "Please count from {} to {}.", "Can you count from {} to {}?"]  # fmt: skip
    return ask(rng.choice(forms).format(start, end), ", ".join(map(str, numbers)))


def compare(rng: random.Random) -> Sample:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        forms, answer = ["Which is larger, {} or {}?", "Which number is bigger: {} or {}?"], max(a, b)
    else:
        forms, answer = ["Which is smaller, {} or {}?", "Which number is less: {} or {}?"], min(a, b)
    return ask(rng.choice(forms).format(a, b), str(answer))


# ---- plain text ----------------------------------------------------------------------------------------------------


def plain_text(rng: random.Random) -> Sample:
    """Something to continue, for completions without a chat template."""
    kind = rng.randrange(4)
    if kind == 0:
        start = rng.randint(0, 70)
        text = ", ".join(str(start + i) for i in range(rng.randint(6, 30)))
        return Sample(keys=(text,), text=text, text_prompt_len=text.index(", ", len(text) // 3) + 1)
    if kind == 1:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        text = f"The capital of {country} is {city}."
        return Sample(keys=(rng.random().hex(),), text=text, text_prompt_len=text.index(f" {city}."))
    if kind == 2:
        start = rng.randrange(12)
        text = " ".join(string.ascii_uppercase[start:])
        return Sample(keys=(rng.random().hex(),), text=text, text_prompt_len=9)
    name, answer = rng.choice(list(facts.CONCEPTS.items()))
    asked = f"Question: What is {name}?\nAnswer:"
    return Sample(keys=(rng.random().hex(),), text=f"{asked} {answer}", text_prompt_len=len(asked))
