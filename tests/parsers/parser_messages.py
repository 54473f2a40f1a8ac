"""What every format is tested with: a message cut in many ways must always be the same message."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.parsers.base import Parser, Tool
from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning


def tool(name: str, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


STRING, INTEGER, ARRAY = {"type": "string"}, {"type": "integer"}, {"type": "array"}
TOOLS = [
    tool("get_weather", city=STRING, days=INTEGER, metric={"type": "boolean"}, tags=ARRAY, where={"type": "object"}),
    tool("get", key=STRING),
    tool("now"),
]


@dataclasses.dataclass
class Message:
    """A message with its pieces joined; `arguments` are texts."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str | None, str]] = dataclasses.field(default_factory=list)

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, _, arguments in self.calls]


def joined(pieces: Iterable[Piece]) -> Message:
    message = Message()
    for piece in pieces:
        match piece:
            case Reasoning(text):
                assert text
                message.reasoning += text
            case Content(text):
                assert text
                message.content += text
            case CallBegin(call, name, call_id):
                assert call == len(message.calls)
                message.calls.append((name, call_id, ""))
            case CallArguments(call, text):
                assert text and call == len(message.calls) - 1, "arguments follow their call"
                name, call_id, arguments = message.calls[call]
                message.calls[call] = (name, call_id, arguments + text)
    return message


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with neighbours of a kind joined."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and type(last) is type(piece) and not isinstance(piece, CallBegin):
            merged[-1] = dataclasses.replace(last, text=last.text + piece.text)  # type: ignore[union-attr]
        else:
            merged.append(piece)
    return merged


def parse(parser: Parser, parts: Sequence[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return pieces + parser.finish()


def cuts(text: str, seed: int = 0, num_random: int = 20) -> Iterable[list[str]]:
    """The text in every two pieces, one character at a time, and at random."""
    yield list(text)
    for middle in range(len(text) + 1):
        yield [text[:middle], text[middle:]]
    rng = random.Random(seed)
    for _ in range(num_random):
        parts, at = [], 0
        while at < len(text):
            step = rng.choice((1, 1, 2, 3, 5, 8, 21))
            parts.append(text[at : at + step])
            at += step
        yield parts
