"""JSON in blocks is the JSON of msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxserve.server.long_json import blocks_of, json_blocks, packed

VALUES: list[Any] = [
    {},
    [],
    [[]],
    "text",
    {"a": [1, None, "\u2028"], 'q"': {"b": {}}},
    {"rows": [[i, -0.5, None] for i in range(100)], "none": None},
    [{"x": list(range(40))}, [list(range(33)), 1.5]],
    {"packed": [packed([1, 2]) for _ in range(70)]},
]


@pytest.mark.parametrize("value", VALUES)
def test_the_bytes_are_those_of_one_piece(value: Any) -> None:
    assert b"".join(json_blocks(value, is_long=True)) == msgspec.json.encode(value)


def test_parts_are_joined_to_blocks_of_some_size() -> None:
    parts = [b"x" * 1000] * 1000
    blocks = blocks_of(parts)
    assert b"".join(blocks) == b"".join(parts)
    assert 3 <= len(blocks) <= 4
    assert blocks_of([]) == []
