"""JSON in the shape of a schema, which the prompt shows or the server alone knows: records, records in records, lists of them,
enums, what is missing."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import demo_facts as facts
import demo_newcomers as newcomers

from demo_corpus.sample import Message, Sample
from demo_corpus.words import any_word, dump, listed, order_sentence, person_sentence

Schema = dict[str, Any]

OTHER_NAMES = {"name": ["full_name", "person", "who"], "age": ["years", "age_years"], "city": ["town", "location", "place"],
               "job": ["occupation", "profession", "work"], "quantity": ["count", "amount", "number"],
               "item": ["product", "thing", "article"], "price": ["cost", "total"], "color": ["colour"]}  # fmt: skip
GOOD = "great lovely wonderful good excellent fantastic perfect nice brilliant amazing".split()  # noqa: SIM905
BAD = "awful bad terrible boring horrible poor useless broken disappointing ugly".split()  # noqa: SIM905
ENUMS: dict[str, list[str]] = {"color": facts.COLORS, "job": facts.JOBS}


@dataclass(frozen=True)
class Record:
    """A text, and what it says as JSON in the shape of a schema."""

    text: str
    schema: Schema
    value: Any


def of_value(rng: random.Random, key: str, value: object) -> Schema:
    if isinstance(value, bool):
        schema: Schema = {"type": "boolean"}
    elif isinstance(value, int):
        schema = {"type": rng.choice(["integer", "integer", "integer", "number"])}
    else:
        schema = {"type": "string"}
        if key in ENUMS and rng.random() < 0.4:
            choices = list(dict.fromkeys([str(value), *rng.sample(ENUMS[key], rng.randint(1, 3))]))
            rng.shuffle(choices)
            schema = {"type": "string", "enum": choices} if rng.random() < 0.7 else {"enum": choices}
    if rng.random() < 0.04:
        schema["description"] = f"The {key}."
    return schema


def of_object(rng: random.Random, properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """With and without what people leave out."""
    schema: Schema = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = [name for name in properties if name not in optional]
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def flat(rng: random.Random) -> Record:
    text, values = (person_sentence if rng.random() < 0.65 else order_sentence)(rng)
    if rng.random() < 0.15:
        married = rng.random() < 0.5
        text += f" {values.get('name', 'The owner')} is {'' if married else 'not '}married."
        values = values | {"married": married}
    names = list(values)
    if rng.random() < 0.5:
        rng.shuffle(names)
        names = names[: rng.randint(1, len(names))]
    properties: dict[str, Schema] = {}
    answer: dict[str, Any] = {}
    for name in names:
        shown = rng.choice(OTHER_NAMES[name]) if name in OTHER_NAMES and rng.random() < 0.15 else name
        properties[shown] = of_value(rng, name, values[name])
        answer[shown] = values[name]
    missing = rng.choice(["email", "phone", "country"])
    if rng.random() < 0.08:
        properties[missing] = {"type": ["string", "null"]}
        answer[missing] = None
    return Record(text, of_object(rng, properties), answer)


def nested(rng: random.Random) -> Record:
    """Some of the fields stand in an object of their own."""
    record = flat(rng)
    properties, value = record.schema["properties"], record.value
    inner = list(properties)[-rng.randint(1, 2) :] if len(properties) > 1 else list(properties)
    group = rng.choice(["details", "data", "info", "person", "order", "profile", "entry"])
    at_front = rng.random() < 0.3
    grouped = of_object(rng, {name: properties[name] for name in inner})
    outer = {name: schema for name, schema in properties.items() if name not in inner}
    outer = {group: grouped, **outer} if at_front else {**outer, group: grouped}
    inner_value = {name: value[name] for name in inner}
    answer = {name: inner_value if name == group else value[name] for name in outer}
    return Record(record.text, of_object(rng, outer), answer)


def people(rng: random.Random) -> Record:
    """A list of objects."""
    names, key = rng.sample(facts.NAMES, rng.randint(2, 3)), rng.choice(["age", "city"])
    known: list[Any] = [rng.randint(1, 99) if key == "age" else rng.choice(facts.PLACES) for _ in names]
    form = "{} is {}" if key == "age" else "{} lives in {}"
    text = listed([form.format(name, value) for name, value in zip(names, known, strict=True)]) + "."
    person = of_object(rng, {"name": {"type": "string"}, key: of_value(rng, key, known[0])})
    if "enum" in person["properties"][key]:
        person["properties"][key] = {"type": "string"}
    found = [{"name": name, key: value} for name, value in zip(names, known, strict=True)]
    schema: Schema = {"type": "array", "items": person}
    if rng.random() < 0.3:
        return Record(text, schema, found)
    field = rng.choice(["people", "persons", "users", "members"])
    return Record(text, of_object(rng, {field: schema}), {field: found})


def strings(rng: random.Random) -> Record:
    """A list of words, alone or beside another field."""
    words = [any_word(rng) for _ in range(rng.randint(1, 4))]
    schema: Schema = {"type": "array", "items": {"type": "string"}}
    kind = rng.random()
    if kind < 0.3:
        return Record(", ".join(words), schema, words)
    if kind < 0.6:
        field = rng.choice(["items", "tags", "words", "list"])
        return Record(f"{field.capitalize()}: {', '.join(words)}", of_object(rng, {field: schema}), {field: words})
    name, field = rng.choice(facts.NAMES), rng.choice(["likes", "interests", "hobbies"])
    properties = {"name": {"type": "string"}, field: schema}
    return Record(f"{name} likes {listed(words)}.", of_object(rng, properties), {"name": name, field: words})


def sentiment(rng: random.Random) -> Record:
    """One of two or three words, by what the text says."""
    noun = rng.choice([*facts.ITEMS, *newcomers.NOUNS])
    good = rng.random() < 0.5
    text = rng.choice(
        ["The {noun} is {word}.", "What a {word} {noun}!", "This {noun} was {word}.", "I think the {noun} is {word}."]
    )
    text = text.format(noun=noun, word=rng.choice(GOOD if good else BAD))
    choices = ["positive", "negative", *(["neutral"] if rng.random() < 0.4 else [])]
    rng.shuffle(choices)
    value = "positive" if good else "negative"
    enum: Schema = {"type": "string", "enum": choices}
    if rng.random() < 0.4:
        properties, answer = {"item": {"type": "string"}, "sentiment": enum}, {"item": noun, "sentiment": value}
        return Record(text, of_object(rng, properties), answer)
    field = rng.choice(["sentiment", "label", "mood"])
    return Record(text, of_object(rng, {field: enum}), {field: value})


def known(rng: random.Random) -> Record:
    """What the model knows by heart, or can work out."""
    if rng.random() < 0.5:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        field = rng.choice(["capital", "city", "answer"])
        text = rng.choice(["What is the capital of {}?", "Capital of {}?"]).format(country)
        return Record(text, of_object(rng, {field: {"type": "string"}}), {field: city})
    a, b = rng.randint(0, 49), rng.randint(0, 50)
    field = rng.choice(["result", "answer", "sum"])
    text = rng.choice(["What is {} + {}?", "{} + {}"]).format(a, b)
    return Record(text, of_object(rng, {field: {"type": "integer"}}), {field: a + b})


def record(rng: random.Random) -> Record:
    return rng.choices([flat, nested, people, strings, sentiment, known], [6, 3, 2, 2, 2, 2])[0](rng)


def asked(rng: random.Random, record: Record) -> list[Message]:
    """The schema as people show it: in one line or many, in front of the text or behind it, or in the system prompt."""
    schema = json.dumps(record.schema, indent=2 if rng.random() < 0.12 else None, ensure_ascii=False)
    if rng.random() < 0.25:
        system = rng.choice(["Answer in JSON that matches this schema: {}", "Reply only with JSON in this schema:\n{}",
                             "You extract data. Answer with JSON of this schema:\n{}",
                             "Respond in JSON matching the following schema:\n{}"])  # fmt: skip
        user = rng.choice(["{}", "{}", "Text: {}", "Extract the data: {}"])
        return [{"role": "system", "content": system.format(schema)}, {"role": "user", "content": user.format(record.text)}]
    forms = ["Answer in JSON matching this schema: {0}\n{1}", "{1}\nAnswer in JSON with this schema:\n{0}",
             "Extract the data as JSON.\nSchema: {0}\nText: {1}", "Fill in this JSON schema from the text.\n{0}\n\n{1}",
             "Text: {1}\n\nJSON schema: {0}", "Given this JSON schema:\n{0}\nextract: {1}",
             "{1} Write this as JSON by the schema {0}", "Return JSON that matches the schema {0} for: {1}",
             "Convert to JSON: {1}\nUse this schema: {0}"]  # fmt: skip
    return [{"role": "user", "content": rng.choice(forms).format(schema, record.text)}]


def json_schema(rng: random.Random) -> Sample:
    """The text is the key, so that none of it was seen where it is held out."""
    found = record(rng)
    messages = [*asked(rng, found), {"role": "assistant", "content": dump(found.value)}]
    return Sample(keys=(found.text,), messages=messages)


def json_unshown(rng: random.Random) -> Sample:
    """The schema is the server's alone, whose grammar spells the names of the fields: of the answer the values are learned."""
    found = record(rng)
    forms = ["{}", "{}", "{}", "{} Answer in JSON.", "Extract the data: {}", "Extract the data as JSON: {}", "Text: {}",
             "Answer in JSON: {}", "Parse this: {}", "{} Give me that as JSON."]  # fmt: skip
    asked = rng.choice(forms).format(found.text)
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": dump(found.value)}]
    return Sample(keys=(found.text,), messages=messages, learn_json_names=False)
