"""A whole message from its pieces, and OpenAI's words for calls."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Any

from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning


@dataclasses.dataclass
class Call:
    id: str
    name: str
    arguments: str = ""  # a JSON object, unless the message was cut off


@dataclasses.dataclass
class Message:
    reasoning: str
    content: str
    calls: list[Call]

    @staticmethod
    def of(pieces: Iterable[Piece]) -> Message:
        reasoning, content, calls, arguments = [], [], [], []
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    reasoning.append(text)
                case Content(text):
                    content.append(text)
                case CallBegin():
                    calls.append(Call(call_id(piece), piece.name))
                    arguments.append([""])
                case CallArguments(index, text):
                    arguments[index].append(text)
        for call, texts in zip(calls, arguments, strict=True):
            call.arguments = "".join(texts)
        return Message("".join(reasoning), "".join(content), calls)

    def to_openai(self) -> dict[str, Any]:
        """As OpenAI's, with SGLang's reasoning_content. A message that only calls has no content."""
        return {
            "role": "assistant",
            "content": None if self.calls and not self.content else self.content,
            "reasoning_content": self.reasoning or None,
            "tool_calls": [call_fields(call) for call in self.calls] or None,
        }


def call_id(call: CallBegin) -> str:
    """The model's, or a new one."""
    return call.id or f"call_{uuid.uuid4().hex[:24]}"


def call_fields(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
