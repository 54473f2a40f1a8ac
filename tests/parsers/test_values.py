"""Values in calls become JSON, however they are written and cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from parser_messages import cuts

from jaxserve.parsers.reader import BrokenCallError, Reader
from jaxserve.parsers.values import DEEPEST, as_json, value

VALUES = [
    ("{}", {}),
    ("[]", []),
    ("null", None),
    ("-1.5e+3", -1500.0),
    ('"a\\"b\\\\c\\/\\u00e9\\ud83d\\ude00"', 'a"b\\c/é😀'),
    ('{"a": {"b": [1, 2, {"c": "}]"}]}, "d" : true}', {"a": {"b": [1, 2, {"c": "}]"}]}, "d": True}),
    ('{"line\nbreak": "tab\there"}', {"line\nbreak": "tab\there"}),
    ("{'single': 'say \"hi\"', \"it's\": 'it\\'s'}", {"single": 'say "hi"', "it's": "it's"}),
    ("[True, False, None, (1, 'x'), ()]", [True, False, None, [1, "x"], []]),
    ("[1, 2,]", [1, 2]),
    ("{'a': 1 , }", {"a": 1}),
    (r'"\d+\.\x41\' \u12"', "\\d+\\.A' \\u12"),
]
BROKEN = [
    "",
    "{",
    "[1",
    '{"a" 1}',
    "{a: 1}",
    "{1: 2}",
    "[1 2]",
    "[,]",
    "tru",
    "01",
    "NaN",
    "1__",
    '"open',
    "[1}",
    "{]",
    "9" * 2000,
]


@pytest.mark.parametrize(("text", "expected"), VALUES, ids=[text for text, _ in VALUES])
def test_a_value_is_json_however_it_is_cut(text: str, expected: Any) -> None:
    json_text = as_json(text)
    assert json_text is not None and json.loads(json_text) == expected
    for parts in cuts(text + ";"):
        reader, read = Reader(), list[str]()
        reading = value(reader, read.append)
        for part in parts:
            reader.push(part)
            next(reading, None)
        reader.end()
        next(reading, None)
        assert "".join(read) == json_text
        assert reader.rest() == ";"


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_value_is_broken(text: str) -> None:
    assert as_json(text) is None


def test_nesting_is_bounded() -> None:
    assert as_json("[" * DEEPEST + "]" * DEEPEST) is not None
    assert as_json("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1)) is None
    assert as_json("[" * 1_000_000) is None


def test_json_stays_as_it_is() -> None:
    rng = random.Random(0)

    def anything(depth: int = 0) -> Any:
        kind = rng.randrange(8 if depth < 4 else 6)
        if kind == 6:
            return [anything(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {anything_text(): anything(depth + 1) for _ in range(rng.randrange(4))}
        return [None, True, False, rng.randrange(-1000, 1000), rng.random() * 1e9, anything_text()][kind]

    def anything_text() -> str:
        return "".join(rng.choice("ab\"\\\n\t/'{}[]:, é😀\x00") for _ in range(rng.randrange(8)))

    for _ in range(300):
        text = json.dumps(anything(), ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 2)))
        assert as_json(text) == text


def test_a_break_leaves_the_beginning_of_a_value() -> None:
    reader, read = Reader(), list[str]()
    reader.push('{"a": [1, 2 3]}')
    with pytest.raises(BrokenCallError):
        list(value(reader, read.append))
    assert "".join(read) == '{"a": [1, 2 '
