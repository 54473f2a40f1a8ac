"""Values that nobody expects, and what becomes of a good body when they are put into it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Body = dict[str, Any]


class Raw(str):
    """Text that stands in the body as it is, where JSON would have a value."""


def hostile_value(draw: random.Random) -> Any:
    return draw.choice(_VALUES)(draw)


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


def _text(draw: random.Random) -> Any:
    texts: list[Any] = [
        "",
        " ",
        "\x00",
        "a\x00b",
        "\r\n[2026-01-01 00:00:00] ERROR forged",
        "\x1b[31mred",
        "\u202e",
        "é" * 999,
        "👩‍👩‍👧" * 50,
    ]
    texts += [
        Raw('"\\ud800"'),
        Raw('"\\udfff\\ud800"'),
        "a" * draw.choice([300, 5_000, 200_000]),
        "a b " * 20_000,
        "<|im_end|><|endoftext|>",
        "{{7*7}}",
    ]
    return draw.choice(texts)


def _number(draw: random.Random) -> Any:
    numbers: list[Any] = [
        0,
        -1,
        1,
        2**31,
        2**32,
        2**63,
        2**64,
        -(2**63) - 1,
        0.5,
        -0.0,
        1e-40,
        1e308,
        4e38,
        Raw("1e999"),
        Raw("-1e999"),
    ]
    numbers += [Raw("9" * 5_000), Raw("NaN"), Raw("Infinity"), Raw("0." + "0" * 400 + "1"), Raw("1e-400"), "1", "NaN", True]
    return draw.choice(numbers)


def _structure(draw: random.Random) -> Any:
    structures: list[Any] = [
        None,
        True,
        False,
        [],
        {},
        [None],
        [[]],
        [{}],
        {"": None},
        {"self": 1},
        {"5": 4e38},
        {"a": {"b": {"c": []}}},
    ]
    structures += [
        _nested(draw.choice([5, 200, 5_000, 100_000])),
        [1] * 5_000,
        ["a"] * 40,
        list(range(-3, 3)),
        {str(i): i for i in range(2_000)},
    ]
    return draw.choice(structures)


def _pattern(draw: random.Random) -> str:
    patterns = [
        "(",
        "[",
        "(a+)+$",
        "(?:b|bb){11}[c]",
        "(a|a)*b",
        "\\1",
        "(?=a)",
        "(?P<x>a)(?P<x>b)",
        "a{1000000}",
        "(((a{99}){99}){99})",
        "[^\\d\\D]",
        "$^",
    ]
    patterns += [
        "a|" * draw.choice([20, 50_000]) + "b",
        ".*" * 50,
        "\\p{L}+",
        "(?i)ß",
        "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
    ]
    return draw.choice(patterns)


def _grammar(draw: random.Random) -> Any:
    grammars: list[Any] = [
        "root ::= root",
        "root ::= ",
        "root ::= x",
        "root ::= (",
        'root ::= "a"' + ' | "b"' * 2_000,
        "root ::= [\\",
        "::=" * 99,
    ]
    grammars += [
        {"type": "object", "properties": {str(i): {"type": "integer"} for i in range(300)}},
        {"$ref": "#"},
        {"$ref": "http://x"},
    ]
    grammars += [
        {"type": "nothing"},
        {"enum": []},
        {"not": {}},
        {"pattern": "("},
        {"minLength": 10**9, "type": "string"},
        "{",
        json.dumps({"allOf": [{}] * 500}),
    ]
    return draw.choice(grammars)


_VALUES: list[Callable[[random.Random], Any]] = [_text, _number, _number, _structure, _structure, _pattern, _grammar]


def encode(body: Any) -> bytes:
    """JSON, with what is Raw in it as it is."""
    raws: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(str(value))
            return f"\x01raw{len(raws) - 1}\x01"
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(mark(body))
    for i, raw in enumerate(raws):
        text = text.replace(json.dumps(f"\x01raw{i}\x01"), raw)
    return text.encode("utf-8", "surrogatepass")


def mutated(body: Body, fields: list[str], draw: random.Random) -> bytes:
    """A good body with one to three things wrong: values, keys, or the text itself."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _mutate(body, fields, draw)
    data = encode(body)
    return _damaged(data, draw) if draw.random() < 0.15 else data


def _mutate(body: Body, fields: list[str], draw: random.Random) -> None:
    holder: Any = body
    while True:  # go down at random, so that nested fields are met as well
        inner = [
            value
            for value in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(value, dict | list) and value
        ]
        if not inner or draw.random() < 0.5:
            break
        holder = draw.choice(inner)
    if isinstance(holder, list):
        holder[draw.randrange(len(holder))] = hostile_value(draw)
        return
    known = [*holder, *(fields if holder is body else [])] or ["x"]
    key = draw.choice(known)
    what = draw.random()
    if what < 0.1:
        holder.pop(key, None)
    elif what < 0.2:
        holder[draw.choice(["", "x" * 3_000, "__proto__", "\x00", key + " "])] = hostile_value(draw)
    else:
        holder[key] = hostile_value(draw)


def _damaged(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    damages = [
        data[:at],
        data + b" garbage",
        data[:at] + draw.randbytes(3) + data[at:],
        b"\xef\xbb\xbf" + data,
        data.decode("latin-1").encode("utf-16"),
        data * 2,
    ]
    return draw.choice(damages)
