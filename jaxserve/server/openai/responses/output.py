"""The output items of a response as they grow, and the events that tell of it. Whole replies ignore the events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxserve.parsers.pieces import CallBegin, Content, Piece, Reasoning
from jaxserve.server.openai.chat.message import call_id
from jaxserve.server.requests import new_rid

Event = dict[str, Any]


class Output:
    def __init__(self, namespaces: Mapping[str, str | None]) -> None:
        """`namespaces`: of the tools, by name."""
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the item that is open
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, pieces: Iterable[Piece], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """`logprobs` are those of the chunk's tokens; they come with the first of its texts that is no thinking."""
        for piece in pieces:
            if self._begins(piece):
                yield from self.close("completed")
                yield from self._open(piece)
            if isinstance(piece, CallBegin):
                continue
            self._texts.append(piece.text)
            match piece:
                case Content(text):
                    yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
                    self._logprobs += logprobs
                    logprobs = []
                case Reasoning(text):
                    yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
                case _:
                    yield self._event("response.function_call_arguments.delta", delta=piece.text)

    def close(self, status: str) -> Iterator[Event]:
        """Ends the item that is open, if one is: completed or incomplete."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        match item["type"]:
            case "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
                item["content"] = [part]
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
                yield self._event("response.content_part.done", content_index=0, part=part)
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
                yield self._event("response.content_part.done", content_index=0, part=part)
            case _:
                item["arguments"] = text
                yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _begins(self, piece: Piece) -> bool:
        """Whether the piece belongs to a new item."""
        kind = self.items[-1]["type"] if self._is_open else None
        if isinstance(piece, Content):
            return kind != "message"
        return kind != "reasoning" if isinstance(piece, Reasoning) else isinstance(piece, CallBegin)

    def _open(self, piece: Piece) -> Iterator[Event]:
        self._texts, self._logprobs, self._is_open = [], [], True
        part: dict[str, Any] | None = None
        match piece:
            case Content():
                item = {"id": f"msg_{new_rid()}", "type": "message", "role": "assistant", "content": []}
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            case Reasoning():
                item = {"id": f"rs_{new_rid()}", "type": "reasoning", "summary": [], "content": []}
                part = {"type": "reasoning_text", "text": ""}
            case _:
                assert isinstance(piece, CallBegin), f"{piece} begins nothing"
                item = {"id": f"fc_{new_rid()}", "type": "function_call", "call_id": call_id(piece), "name": piece.name}
                item["arguments"] = ""
                if (namespace := self._namespaces.get(piece.name)) is not None:
                    item["namespace"] = namespace
        item["status"] = "in_progress"
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if part is not None:
            yield self._event("response.content_part.added", content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
