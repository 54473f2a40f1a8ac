"""Tasks of one question each that are answered from the words of the prompt: copies, lists, JSON."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import demo_facts as facts

from demo_corpus.sample import Sample, ask, reword


def made_up_word(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))


def any_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return made_up_word(rng)
    if kind < 0.3:
        return rng.choice(facts.FOREIGN)
    if kind < 0.4:
        return rng.choice([*facts.NAMES, *facts.PLACES])
    return rng.choice([*facts.WORDS, *facts.ITEMS, *facts.COLORS])


def phrase(rng: random.Random, longest: int = 7) -> str:
    return " ".join(any_word(rng) for _ in range(rng.randint(1, longest)))


def copying(rng: random.Random) -> Sample:
    """Long phrases too: nothing teaches a model faster to look back at its prompt."""
    text = phrase(rng, longest=30 if rng.random() < 0.5 else 6)
    if rng.random() < 0.2:
        text = text[0].upper() + text[1:] + rng.choice(".!?")
    forms = ["Repeat after me: {}", "Repeat: {}", "Say: {}", 'Say "{}"', "Echo this: {}", 'Repeat the text "{}"', "Copy: {}"]
    return ask(rng.choice(forms).format(text), text)


def repeated_text(rng: random.Random) -> Sample:
    text = phrase(rng, 12)
    times = rng.randint(2, 5)
    return Sample(keys=(text,), text="\n".join([text] * times), text_prompt_len=len(text) + 1)


def reversing(rng: random.Random) -> Sample:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    forms = ["Reverse the list: {}", "Reverse: {}", "Put this list in reverse order: {}"]
    return ask(rng.choice(forms).format(", ".join(words)), ", ".join(reversed(words)))


def picking(rng: random.Random) -> Sample:
    words = [any_word(rng) for _ in range(rng.randint(3, 5))]
    position, name = rng.choice([(0, "first"), (1, "second"), (2, "third"), (-1, "last")])
    forms = ["What is the {} word of this list: {}", "Name the {} item: {}"]
    return ask(rng.choice(forms).format(name, ", ".join(words)), words[position])


def letters(rng: random.Random) -> Sample:
    start = rng.randrange(25)
    after, before = string.ascii_uppercase[start + 1], string.ascii_uppercase[start]
    if rng.random() < 0.5:
        return ask(reword(rng, f"Which letter comes after {before}?"), after)
    return ask(reword(rng, f"Which letter comes before {after}?"), before)


# ---- JSON ----------------------------------------------------------------------------------------------------------


def dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def person_sentence(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice(facts.NAMES) if rng.random() < 0.8 else made_up_word(rng).capitalize()
    city = rng.choice(facts.PLACES) if rng.random() < 0.85 else made_up_word(rng).capitalize()
    age, job = rng.randint(1, 99), rng.choice(facts.JOBS)
    return rng.choice([
        (f"{name} is {age} years old.", {"name": name, "age": age}),
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} lives in {city} and is {age} years old.", {"name": name, "age": age, "city": city}),
        (f"{name}, {age}, lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} is a {job} from {city}.", {"name": name, "job": job, "city": city}),
        (f"My name is {name}, I am {age} and I work as a {job} in {city}.",
         {"name": name, "age": age, "job": job, "city": city}),
        (f"{name} ({age}) works as a {job}.", {"name": name, "age": age, "job": job}),
    ])  # fmt: skip


def order_sentence(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, item, color = rng.choice(facts.NAMES), rng.choice(facts.ITEMS), rng.choice(facts.COLORS)
    count, price = rng.randint(2, 30), rng.randint(1, 99)
    return rng.choice([
        (f"{name} bought {count} {item}s for {price} euros.",
         {"name": name, "quantity": count, "item": item, "price": price}),
        (f"The {color} {item} costs {price} dollars.", {"color": color, "item": item, "price": price}),
        (f"{name} has a {color} {item}.", {"name": name, "color": color, "item": item}),
    ])  # fmt: skip


def json_extraction(rng: random.Random) -> Sample:
    sentence, values = (person_sentence if rng.random() < 0.7 else order_sentence)(rng)
    keys = list(values)
    if rng.random() < 0.6:
        rng.shuffle(keys)
        keys = keys[: rng.randint(1, len(keys))]
    forms = ["Extract {} as JSON: {}", "Return {} as JSON: {}", "Give me {} as JSON. Text: {}", "{} as JSON: {}",
             "Extract {} from this text and answer in JSON: {}", "Make a JSON object with the fields {}: {}"]  # fmt: skip
    answer = dump({key: values[key] for key in keys})
    if len(keys) == len(values) and rng.random() < 0.15:  # all that the text says, in its order
        forms = ["Extract as JSON: {1}", "As JSON: {1}", "Extract the data as JSON: {1}", "Write this as JSON: {1}"]
        answer = dump(values)
    return ask(rng.choice(forms).format(listed(keys), sentence), answer)


def json_person(rng: random.Random) -> Sample:
    """A fixed example person: for schemas that bring no data of their own."""
    values = {"name": "Ada", "age": 36, "city": "London", "job": "engineer"}
    keys = rng.sample(list(values), rng.randint(1, 4))
    forms = ["Describe a person as JSON with {}.", "Give me an example person as JSON with {}.",
             "Make up a person. Answer in JSON with {}.", "A person as JSON with the fields {}."]  # fmt: skip
    return ask(rng.choice(forms).format(listed(keys)), dump({key: values[key] for key in keys}))


def json_list(rng: random.Random) -> Sample:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    forms = ["Write as a JSON list: {}", "Make a JSON array of: {}", "As a JSON list: {}"]
    return ask(rng.choice(forms).format(", ".join(words)), dump(words))
