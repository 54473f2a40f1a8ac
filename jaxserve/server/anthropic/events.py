"""The events of a streamed message.

message_start, ping, (content_block_start, content_block_delta..., content_block_stop)..., message_delta, message_stop
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxserve.parsers.pieces import CallBegin, Piece
from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.anthropic.reply import EMPTY_BLOCK, SIGNATURE, begun_block, begun_usage, final_usage, message, stop_reason
from jaxserve.server.http.envelopes import ANTHROPIC
from jaxserve.server.openai.chat import ChatJob
from jaxserve.server.requests import GenerationChunk, RequestError, raise_if_failed

_encode = msgspec.json.encode
# By type of block: the type of its delta, and the name of the delta's text.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


class MessageEvents:
    """An EventWriter of one message."""

    def __init__(self, job: ChatJob, body: MessagesRequest) -> None:
        self._job = job
        self._body = body
        self._parser = job.message_parser()
        self._shows_thinking = body.shows_thinking
        self._index = -1  # of the block that came last
        self._kind: str | None = None  # the type of the block that is open
        self._before_text = b""  # what comes before a text of that block, in its deltas
        self._has_begun = self._has_calls = False

    def push(self, chunk: GenerationChunk) -> bytes:
        raise_if_failed(chunk)
        self._job.usage.add(chunk)
        events = []
        if not self._has_begun:
            self._has_begun = True
            begun = message(self._job.reply_id, self._body.model, [], None, begun_usage(chunk))
            events = [_event("message_start", {"message": begun}), _event("ping", {})]
        events += self._of_pieces(self._parser.feed(chunk.text))
        if chunk.finish_reason is not None:
            events += self._of_pieces(self._parser.finish())
            events += self._end_of(chunk)
        return b"".join(events)

    def end(self) -> bytes:
        return _event("message_stop", {})

    def error(self, error: RequestError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode(ANTHROPIC.body(error))

    def _of_pieces(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            head = begun_block(piece, self._kind)
            if head is not None:
                yield from self._stop_block()
                yield self._start_block(head)
            if isinstance(piece, CallBegin):
                self._has_calls = True
            elif self._shows_thinking or self._kind != "thinking":
                yield b"%b%b}}\n\n" % (self._before_text, _encode(piece.text))

    def _start_block(self, head: dict[str, Any]) -> bytes:
        self._index += 1
        self._kind = head["type"]
        delta, name = _DELTAS[head["type"]]
        self._before_text = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._index, delta.encode(), name.encode())
        )
        return _event("content_block_start", {"index": self._index, "content_block": head})

    def _stop_block(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event("content_block_delta", {"index": self._index, "delta": signature})
        if self._kind is not None:
            yield _event("content_block_stop", {"index": self._index})
        self._kind = None

    def _end_of(self, last: GenerationChunk) -> Iterator[bytes]:
        if self._index < 0:
            yield self._start_block(EMPTY_BLOCK)
        yield from self._stop_block()
        stop = stop_reason(last, self._body.max_tokens, has_calls=self._has_calls)
        delta = {"stop_reason": stop.reason, "stop_sequence": stop.sequence}
        yield _event("message_delta", {"delta": delta, "usage": final_usage(last, self._job.usage)})
