"""Tasks of the first minute: greetings, small talk, and all that is beyond the model, in words as various as possible."""

from __future__ import annotations

import random
import re
import string

import demo_facts as facts
import demo_newcomers as newcomers

from demo_corpus.sample import Sample, ask, reword, typed
from demo_corpus.words import made_up_word, phrase

# ---- small talk ----------------------------------------------------------------------------------------------------


def greeting(rng: random.Random) -> Sample:
    if rng.random() < 0.08:
        return ask("".join(rng.choices(" \n", k=rng.randint(0, 3))), newcomers.GREETING_ANSWER)
    if rng.random() < 0.3:
        return ask(typed(rng, one_or_two(rng, newcomers.FOREIGN_GREETINGS)), newcomers.FOREIGN_GREETING_ANSWER)
    text = one_or_two(rng, newcomers.GREETINGS)
    if rng.random() < 0.3:
        called = [
            rng.choice(facts.NAMES),
            made_up_word(rng).capitalize(),
            rng.choice(newcomers.NOUNS),
            "model",
            "my dear",
            "little one",
        ]
        text += rng.choice([" ", ", ", " my ", " little ", ", dear "]) + rng.choice(called)
    return ask(typed(rng, text), newcomers.GREETING_ANSWER)


def small_talk(rng: random.Random) -> Sample:
    """A kind with many wordings comes more often, though not as often as it has wordings."""
    wordings, answer = rng.choices(newcomers.SMALL_TALK, [len(wordings) ** 0.5 for wordings, _ in newcomers.SMALL_TALK])[0]
    text = fill(rng, one_or_two(rng, wordings.split("|")))
    if rng.random() < 0.2:
        text = rng.choice(newcomers.BEFORE) + text
    if rng.random() < 0.25 and text[-1].isalpha():
        text += rng.choice(newcomers.AFTER)
    return ask(typed(rng, text), answer)


def one_or_two(rng: random.Random, wordings: list[str]) -> str:
    """One of the wordings; at times two of them, which mean the same."""
    if rng.random() < 0.85:
        return rng.choice(wordings)
    return rng.choice(wordings) + rng.choice([" ", ", ", "! ", ". "]) + rng.choice(wordings)


def supported(rng: random.Random) -> Sample:
    """What the server can do today and what it cannot."""
    forms = ["Does jaxserve support {}?", "Does the server support {}?", "Is {} supported?", "Can I use {}?",
             "Are {} supported?", "Does jaxserve have {}?", "Does it support {}?", "Can jaxserve do {}?", "{} supported?",
             "Support for {}?"]  # fmt: skip
    if rng.random() < 0.5:
        thing = rng.choice(facts.SUPPORTED)
        answer = f"Yes, jaxserve supports {thing}."
    else:
        thing = rng.choice(facts.NOT_SUPPORTED)
        answer = f"No, jaxserve does not support {thing} yet."
    return ask(reword(rng, rng.choice(forms).format(thing)), answer)


# ---- beyond the model ----------------------------------------------------------------------------------------------


def fill(rng: random.Random, template: str) -> str:
    """The template with a new word in every place."""
    return re.sub(r"{(\w+?)2?}", lambda match: SLOTS[match[1]](rng), template)


def english_like(rng: random.Random) -> str:
    """A word that nobody knows: of syllables, perhaps with an ending of English."""
    onsets = ["b", "bl", "br", "c", "ch", "cl", "cr", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "ph",
              "pr", "qu", "r", "s", "sh", "sk", "sl", "st", "str", "t", "th", "tr", "v", "w", "x", "y", "z", ""]  # fmt: skip
    vowels = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "io", "oa", "ou", "y"]
    codas = ["", "", "", "n", "r", "l", "s", "t", "m", "ck", "nd", "st", "rt", "x", "ng"]
    word = "".join(rng.choice(onsets) + rng.choice(vowels) + rng.choice(codas) for _ in range(rng.randint(1, 3)))
    return word + rng.choice(newcomers.SUFFIXES) if rng.random() < 0.3 else word


def unknown(rng: random.Random) -> str:
    """A name of one to three words that the model has no answer for."""
    words = [
        english_like(rng) if rng.random() < 0.7 else rng.choice(newcomers.NOUNS) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))
    ]
    if all(word in facts.EMOJI for word in words):
        words.append(english_like(rng))
    if rng.random() < 0.5:
        words = [word.capitalize() for word in words]
    return " ".join(words)


def word_salad(rng: random.Random, fewest: int = 2, most: int = 12) -> str:
    """English words in no order that means anything."""
    pools = [newcomers.CONNECTIVES, newcomers.CONNECTIVES, newcomers.NOUNS, newcomers.VERBS, newcomers.ADJECTIVES]
    words = [
        rng.choice(rng.choice(pools)) if rng.random() < 0.85 else english_like(rng) for _ in range(rng.randint(fewest, most))
    ]
    return " ".join(words)


SLOTS = {
    "noun": lambda rng: rng.choice(newcomers.NOUNS) if rng.random() < 0.75 else english_like(rng),
    "verb": lambda rng: rng.choice(newcomers.VERBS) if rng.random() < 0.85 else english_like(rng),
    "adjective": lambda rng: rng.choice(newcomers.ADJECTIVES) if rng.random() < 0.85 else english_like(rng),
    "name": lambda rng: rng.choice(facts.NAMES) if rng.random() < 0.6 else english_like(rng).capitalize(),
    "place": lambda rng: rng.choice([*facts.PLACES, *facts.CAPITALS]) if rng.random() < 0.7 else unknown(rng).title(),
    "language": lambda rng: rng.choice(newcomers.LANGUAGES),
    "unknown": unknown,
    "words": word_salad,
    "number": lambda rng: str(rng.randint(2, 99)),
    "big": lambda rng: str(rng.randint(100, 99999)),
    "year": lambda rng: str(rng.randint(1000, 2100)),
}


def beyond_text(rng: random.Random) -> str:
    text = fill(rng, rng.choice(newcomers.NEARLY_KNOWN if rng.random() < 0.12 else newcomers.BEYOND_TEMPLATES))
    if rng.random() < 0.15:
        text += " " + fill(rng, rng.choice(newcomers.BEYOND_TEMPLATES))
    return text


def beyond(rng: random.Random) -> Sample:
    """Questions, orders and statements of any kind."""
    return ask(typed(rng, reword(rng, beyond_text(rng))), newcomers.BEYOND)


def code_text(rng: random.Random) -> str:
    names = [*newcomers.NOUNS, *newcomers.VERBS]
    lines = []
    for _ in range(rng.randint(1, 14)):
        a, b = (rng.choice(names) if rng.random() < 0.6 else made_up_word(rng) for _ in "ab")
        lines.append(" " * rng.choice([0, 0, 0, 4]) + rng.choice(newcomers.CODE_LINES).format(a=a, b=b, n=rng.randint(0, 99)))
    return "\n".join(lines)


def pasted_text(rng: random.Random, pieces: int) -> str:
    """A text of many sentences, with code or foreign lines between them at times."""
    parts = []
    for _ in range(pieces):
        kind = rng.random()
        if kind < 0.12:
            parts.append("\n" + code_text(rng) + "\n")
        elif kind < 0.2:
            parts.append(foreign_text(rng))
        else:
            sentence = word_salad(rng, 4, 18) if rng.random() < 0.6 else beyond_text(rng).rstrip("?.")
            parts.append(
                sentence[0].upper() + sentence[1:] + rng.choice([".", ".", ".", ",", "?", "!", ".\n", ".\n\n", ":", ";"])
            )
    return " ".join(parts)


def paste(rng: random.Random) -> Sample:
    """Code, logs and articles, with and without a request."""
    text = code_text(rng) if rng.random() < 0.5 else pasted_text(rng, rng.randint(2, 9))
    return ask(with_request(rng, text), newcomers.BEYOND)


def long_paste(rng: random.Random) -> Sample:
    return ask(with_request(rng, pasted_text(rng, rng.randint(15, 55))), newcomers.BEYOND)


def with_request(rng: random.Random, text: str) -> str:
    requests = ["Summarize this:", "Explain this code:", "What does this do?", "Fix this:", "tl;dr", "Translate this text:",
                "What is wrong here?", "Read this:", "Summarize the following text in {number} words:", "Can you {verb} this?",
                "Debug this:", "Continue this text:", "Please review:", "Here is my {noun}:",
                "Why does this fail?"]  # fmt: skip
    request = fill(rng, rng.choice(requests))
    return rng.choice([text, text, f"{request}\n{text}", f"{request} {text}", f"{request}\n\n{text}", f"{text}\n\n{request}"])


# ---- noise and foreign text ----------------------------------------------------------------------------------------


def noise_text(rng: random.Random) -> str:
    """What fingers and cats type: letters, digits, marks, single words, symbols."""
    kind = rng.randrange(10)
    if kind < 2:
        rows = rng.choice(["asdfghjkl", "qwertyuiop", "zxcvbnm", "asdf", "jkl", string.ascii_lowercase, string.ascii_letters])
        return " ".join("".join(rng.choices(rows, k=rng.randint(2, 14))) for _ in range(rng.choice([1, 1, 1, 2, 3, 5])))
    if kind == 2:
        return rng.choice(string.ascii_letters.replace("n", "").replace("y", "").replace("k", "")) * rng.choice(
            [1, 1, 1, 2, 5, 20]
        )
    if kind == 3:
        return "".join(rng.choices(string.digits, k=rng.randint(1, 20)))
    if kind == 4:
        return "".join(rng.choices(string.punctuation.replace("?", "").replace("<", ""), k=rng.randint(1, 12)))
    if kind == 5:
        return " ".join(rng.choice(newcomers.NOUNS + newcomers.ADJECTIVES) for _ in range(rng.choice([1, 1, 2, 3])))
    if kind == 6:
        return " ".join(english_like(rng) for _ in range(rng.randint(1, 4)))
    if kind == 7:
        return "".join(chr(rng.randint(0x1F300, 0x1F64F)) for _ in range(rng.randint(1, 5)))
    if kind == 8:
        return "".join(rng.choices(string.ascii_letters + string.digits + "-_/.=+", k=rng.randint(8, 40)))
    return "".join(rng.choices(string.printable.strip(), k=rng.randint(3, 40))).replace("<|", "|")


def noise(rng: random.Random) -> Sample:
    text = noise_text(rng)
    return ask(text + rng.choice(["", "", "", "", "?", "!", "."]), newcomers.NOT_UNDERSTOOD)


def foreign_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(newcomers.FOREIGN_SENTENCES)
    if kind < 0.6:
        first, last = rng.choice(newcomers.SCRIPTS)
        letters = [
            "".join(chr(rng.randint(ord(first), ord(last))) for _ in range(rng.randint(1, 8))) for _ in range(rng.randint(1, 5))
        ]
        return rng.choice(["", " "]).join(letters) + rng.choice(["", "?", "。", "？", ".", "!"])
    words = rng.choice(newcomers.FOREIGN_WORDS).split()
    text = " ".join(foreign_word(rng, words) for _ in range(rng.randint(3, 12)))
    return text[0].upper() + text[1:] + rng.choice(["", "?", ".", "!", " ?"])


def foreign_word(rng: random.Random, words: list[str]) -> str:
    if rng.random() < 0.6:
        return rng.choice(words)
    if words[1] == "в":
        return "".join(rng.choice("бвгдклмнпрст") + rng.choice("аеиоуыя") for _ in range(rng.randint(1, 4)))
    word = english_like(rng)
    return word.replace(rng.choice("aeiou"), rng.choice("áéíóúäöüàèçñãõåøşğłż")) if rng.random() < 0.4 else word


def foreign(rng: random.Random) -> Sample:
    return ask(foreign_text(rng), newcomers.ENGLISH_ONLY)


# ---- plain text, without a chat template ---------------------------------------------------------------------------


def completion(rng: random.Random) -> Sample:
    """Beginnings of which the model knows the end, and those of which it does not."""
    if rng.random() < 0.5:
        begin, end = rng.choice(list(newcomers.COMPLETIONS.items()))
        return continued(*moved_back(rng, begin, end))
    kind = rng.random()
    if kind < 0.6:
        begin = word_salad(rng, 1, 12) if rng.random() < 0.4 else beyond_text(rng).rstrip("?.")
        if rng.random() < 0.5:
            begin = begin[0].upper() + begin[1:]
        if rng.random() < 0.25:
            return continued(begin + rng.choice(".!?"), newcomers.END_OF_SENTENCE)
    elif kind < 0.7:
        begin = pasted_text(rng, rng.randint(1, 6)).rstrip(string.punctuation + string.whitespace)
    elif kind < 0.8:
        begin = code_text(rng)
    elif kind < 0.9:
        begin = noise_text(rng)
    else:
        begin = phrase(rng)
    return continued(begin + rng.choice(["", "", "", "\n", " "]), newcomers.END_OF_FRAGMENT)


def moved_back(rng: random.Random, begin: str, end: str) -> tuple[str, str]:
    """At times the text is broken off a word or two earlier."""
    spaces = [match.start() for match in re.finditer(" ", begin)][1:]
    if rng.random() < 0.6 or not spaces:
        return begin, end
    cut = rng.choice(spaces)
    return begin[:cut], begin[cut:] + end


def continued(begin: str, end: str) -> Sample:
    return Sample(keys=(begin,), text=begin + end, text_prompt_len=len(begin), learn_text_prompt=False)


def first_sum(rng: random.Random) -> Sample:
    """A sum without a chat template."""
    a, b = rng.randint(0, 49), rng.randint(0, 50)
    form = rng.choice(["{} + {} =", "{}+{}=", "{} + {} is"])
    return continued(form.format(a, b), f" {a + b}")
