"""The bytes of a streamed OpenAI reply. Everything that does not change from event to event is built once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.server.http.connection import DONE_EVENT, event
from jaxserve.server.http.envelopes import OPENAI
from jaxserve.server.openai.collect import Usage, matched_stop
from jaxserve.server.openai.protocol import OpenAIRequest
from jaxserve.server.requests import GenerationChunk, RequestError, raise_if_failed
from jaxserve.types import FinishReason

_encode = msgspec.json.encode


class StreamWriter:
    """Makes the events of one request. `object_name` is text_completion or chat.completion.chunk; `text_field` is the JSON
    before and after the text of a choice."""

    def __init__(
        self,
        object_name: str,
        text_field: tuple[bytes, bytes],
        reply_id: str,
        created_s: int,
        request: OpenAIRequest,
        args: ServerArgs,
    ) -> None:
        self._text_field = text_field
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands around its text
        head = {"id": reply_id, "object": object_name, "created": created_s, "model": args.effective_served_model_name}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        options = request.stream_options
        wants_usage = options.include_usage if options else None
        self._ends_with_usage = args.stream_response_default_include_usage if wants_usage is None else wants_usage
        self._continuous = bool(options and options.continuous_usage_stats)
        # OpenAI: with include_usage every chunk but the last has a null usage.
        self._no_usage = b',"usage":null}\n\n' if self._ends_with_usage else b"}\n\n"

    def choice(
        self,
        chunk: GenerationChunk,
        fields: bytes,
        logprobs: Any,
        reason: FinishReason | None,
        extra: dict[str, Any],
        usage: Usage,
    ) -> bytes:
        """One event with one choice. `fields` is the JSON of what carries the text, such as `"text":"..."`."""
        parts = [self._head, b'{"index":%d,' % chunk.index, fields, b',"logprobs":']
        parts.append(b"null" if logprobs is None else _encode(logprobs))
        if reason is None:
            parts.append(b',"finish_reason":null,"matched_stop":null')
        else:
            parts.append(b',"finish_reason":"%b","matched_stop":%b' % (reason.type.encode(), _encode(matched_stop(reason))))
        for name, value in extra.items():
            parts.append(b',"%b":%b' % (name.encode(), _encode(value)))
        parts.append(b"}]")
        if self._continuous:
            parts.append(b',"usage":' + _encode(usage.of_sequence(chunk)) + b"}\n\n")
        else:
            parts.append(self._no_usage)
        return b"".join(parts)

    def text(self, chunk: GenerationChunk, text: str, usage: Usage) -> bytes:
        """One event with the text of one choice and nothing else: what nearly all events of a stream are."""
        frame = self._frames.get(chunk.index)
        if frame is None:
            frame = self._frames[chunk.index] = self._frame(chunk.index)
        before, after = frame
        if self._continuous:
            return b"".join((before, _encode(text), after, b',"usage":', _encode(usage.of_sequence(chunk)), b"}\n\n"))
        return b"".join((before, _encode(text), after))

    def text_fields(self, text: str) -> bytes:
        """`fields` of `choice` for a text."""
        before, after = self._text_field
        return before + _encode(text) + after

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        before, after = self._text_field
        frame_end = b"" if self._continuous else self._no_usage
        return (
            b'%b{"index":%d,%b' % (self._head, index, before),
            after + b',"logprobs":null,"finish_reason":null,"matched_stop":null}]' + frame_end,
        )

    def end(self, usage: Usage) -> bytes:
        """[DONE], and before it, if the client wants it, an event without choices: the request's usage."""
        if not self._ends_with_usage:
            return DONE_EVENT
        return self._head + b'],"usage":' + _encode(usage.total()) + b"}\n\n" + DONE_EVENT


class ChoiceEvents:
    """The events of one request, an EventWriter: `_events` says what is special about its kind of reply."""

    def __init__(self, writer: StreamWriter, usage: Usage, *, with_ids: bool) -> None:
        self._writer = writer
        self._usage = usage
        self._with_ids = with_ids  # token ids come with the text
        self._begun: set[int] = set()  # choices that have had an event

    def push(self, chunk: GenerationChunk) -> bytes:
        self._usage.add(chunk)
        if chunk.index in self._begun and chunk.finish_reason is None and not chunk.logprobs and not self._with_ids:
            return self._writer.text(chunk, chunk.text, self._usage) if chunk.text else b""
        raise_if_failed(chunk)
        is_first = chunk.index not in self._begun
        self._begun.add(chunk.index)
        return b"".join(self._events(chunk, is_first))

    def end(self) -> bytes:
        return self._writer.end(self._usage)

    def error(self, error: RequestError) -> bytes:
        return event(_encode(OPENAI.body(error))) + DONE_EVENT

    def _events(self, chunk: GenerationChunk, is_first: bool) -> Iterator[bytes]:
        """Those of a chunk that says more than a text."""
        raise NotImplementedError

    def _ids(self, chunk: GenerationChunk) -> dict[str, Any]:
        return {"token_ids": chunk.token_ids} if self._with_ids else {}
