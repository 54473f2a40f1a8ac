"""JSON in blocks: a reply of a hundred megabytes is never one object, whose making and copying would hold up all else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

# Of a long reply, at least, but for its last.
_BLOCK_BYTES = 256 * 1024
# Elements of a longer list are encoded so many at a time.
_SLICE = 32


def packed(value: Any) -> msgspec.Raw:
    """A part of a reply, kept as JSON until the reply is made: less memory than the objects."""
    return msgspec.Raw(msgspec.json.encode(value))


def json_parts(value: Any) -> Iterator[bytes]:
    """The JSON of what msgspec takes, its dicts' keys being strings; together the bytes that msgspec makes."""
    if isinstance(value, dict):
        before = b"{"
        for key, member in value.items():
            yield before + msgspec.json.encode(key) + b":"
            yield from json_parts(member)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > _SLICE:
        before = b"["
        for first in range(0, len(value), _SLICE):
            yield before + msgspec.json.encode(value[first : first + _SLICE])[1:-1]
            before = b","
        yield b"]"
    elif isinstance(value, list) and any(isinstance(element, dict | list) for element in value):
        before = b"["
        for element in value:
            yield before
            yield from json_parts(element)
            before = b","
        yield b"]"
    else:
        yield msgspec.json.encode(value)


def blocks_of(parts: Iterable[bytes]) -> list[bytes]:
    """The same bytes, in blocks of some size."""
    blocks: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= _BLOCK_BYTES:
            blocks.append(b"".join(waiting))
            waiting, size = [], 0
    return [*blocks, b"".join(waiting)] if waiting else blocks


def json_blocks(value: Any, *, is_long: bool) -> list[bytes]:
    """What is not long is encoded at once, many times as fast."""
    return blocks_of(json_parts(value)) if is_long else [msgspec.json.encode(value)]
