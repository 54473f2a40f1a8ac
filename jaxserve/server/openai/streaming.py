"""The bytes of a streamed OpenAI reply. Everything that does not change from event to event is built once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.messages import HiddenStates
from jaxserve.server.http.connection import DONE_EVENT, event
from jaxserve.server.http.envelopes import OPENAI
from jaxserve.server.openai.collect import Ending, Usage
from jaxserve.server.openai.hidden_states import hidden_states_field
from jaxserve.server.openai.protocol import OpenAIRequest
from jaxserve.server.requests import GenerationChunk, RequestError, raise_if_failed

_encode = msgspec.json.encode


class TextField:
    """The JSON before and after a text of a choice, and what stands around it in each choice's events of one request."""

    __slots__ = ("after", "before", "frames")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after
        self.frames: dict[int, tuple[bytes, bytes]] = {}

    def json(self, text: str) -> bytes:
        return self.before + _encode(text) + self.after


class StreamWriter:
    """Makes the events of one request. `object_name` is text_completion or chat.completion.chunk."""

    def __init__(
        self,
        object_name: str,
        reply_id: str,
        created_s: int,
        request: OpenAIRequest,
        model: str,
        args: ServerArgs,
    ) -> None:
        head = {"id": reply_id, "object": object_name, "created": created_s, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        options = request.stream_options
        wants_usage = options.include_usage if options else None
        self._ends_with_usage = args.stream_response_default_include_usage if wants_usage is None else wants_usage
        self._continuous = bool(options and options.continuous_usage_stats)
        # OpenAI: with include_usage every chunk but the last has a null usage.
        self._no_usage = b',"usage":null}\n\n' if self._ends_with_usage else b"}\n\n"
        self._request = request

    def choice(
        self,
        chunk: GenerationChunk,
        fields: bytes,
        logprobs: Any,
        ending: Ending | None,
        extra: dict[str, Any],
        usage: Usage,
    ) -> bytes:
        """One event with one choice. `fields` is the JSON of what carries the text, such as `"text":"..."`."""
        parts = [self._head, b'{"index":%d,' % chunk.index, fields, b',"logprobs":']
        parts.append(b"null" if logprobs is None else _encode(logprobs))
        if ending is None:
            parts.append(b',"finish_reason":null,"matched_stop":null')
        else:
            reason, matched = ending
            parts.append(b',"finish_reason":"%b","matched_stop":%b' % (reason.encode(), _encode(matched)))
        for name, value in extra.items():
            parts.append(b',"%b":%b' % (name.encode(), _encode(value)))
        parts.append(b"}]")
        if self._continuous:
            parts.append(b',"usage":' + _encode(usage.of_sequence(chunk)) + b"}\n\n")
        else:
            parts.append(self._no_usage)
        return b"".join(parts)

    def text(self, chunk: GenerationChunk, text: str, field: TextField, usage: Usage) -> bytes:
        """One event with a text of one choice and nothing else: what nearly all events of a stream are."""
        frame = field.frames.get(chunk.index)
        if frame is None:
            frame = field.frames[chunk.index] = self._frame(chunk.index, field)
        before, after = frame
        if self._continuous:
            return b"".join((before, _encode(text), after, b',"usage":', _encode(usage.of_sequence(chunk)), b"}\n\n"))
        return b"".join((before, _encode(text), after))

    def _frame(self, index: int, field: TextField) -> tuple[bytes, bytes]:
        frame_end = b"" if self._continuous else self._no_usage
        return (
            b'%b{"index":%d,%b' % (self._head, index, field.before),
            field.after + b',"logprobs":null,"finish_reason":null,"matched_stop":null}]' + frame_end,
        )

    def end(self, usage: Usage) -> bytes:
        """[DONE], and before it, if the client wants them, events without choices: what SGLang calls sglext, and the
        request's usage."""
        parts = []
        if sglext := usage.sglext(self._request):
            parts += [self._head, b'],"sglext":', _encode(sglext), self._no_usage]
        if self._ends_with_usage:
            parts += [self._head, b'],"usage":', _encode(usage.total()), b"}\n\n"]
        return b"".join((*parts, DONE_EVENT))


class ChoiceEvents:
    """The events of one request, an EventWriter: `_events` says what is special about its kind of reply."""

    def __init__(self, writer: StreamWriter, text: TextField, usage: Usage, request: OpenAIRequest) -> None:
        self._writer = writer
        self._text = text
        self._usage = usage
        self._request = request
        self._with_ids = bool(request.return_token_ids)  # token ids come with the text
        self._begun: set[int] = set()  # choices that have had an event
        self._hidden_states: dict[int, HiddenStates] = {}  # the newest of each choice

    def push(self, chunk: GenerationChunk) -> bytes:
        self._note(chunk)
        if chunk.index in self._begun and chunk.finish_reason is None and not chunk.logprobs and not self._with_ids:
            return self._writer.text(chunk, chunk.text, self._text, self._usage) if chunk.text else b""
        return b"".join(self._more(chunk))

    def parts(self, chunk: GenerationChunk) -> Iterator[bytes]:
        """The same, event by event."""
        self._note(chunk)
        return self._more(chunk)

    def _note(self, chunk: GenerationChunk) -> None:
        self._usage.add(chunk)
        if chunk.hidden_states:
            self._hidden_states[chunk.index] = chunk.hidden_states[-1]

    def _more(self, chunk: GenerationChunk) -> Iterator[bytes]:
        raise_if_failed(chunk)
        is_first = chunk.index not in self._begun
        self._begun.add(chunk.index)
        yield from self._events(chunk, is_first)
        if chunk.finish_reason is not None:
            field = hidden_states_field(self._request, self._hidden_states.pop(chunk.index, None))
            if field:
                yield self._hidden_states_event(chunk, field)

    def num_numbers(self, chunk: GenerationChunk) -> int:
        return chunk.num_numbers

    def end(self) -> bytes:
        return self._writer.end(self._usage)

    def error(self, error: RequestError) -> bytes:
        return event(_encode(OPENAI.body(error))) + DONE_EVENT

    def _events(self, chunk: GenerationChunk, is_first: bool) -> Iterator[bytes]:
        """Those of a chunk that says more than a text."""
        raise NotImplementedError

    def _hidden_states_event(self, chunk: GenerationChunk, field: dict[str, Any]) -> bytes:
        """What follows the end of a choice, as SGLang's does."""
        raise NotImplementedError

    def _ids(self, chunk: GenerationChunk) -> dict[str, Any]:
        return {"token_ids": chunk.token_ids} if self._with_ids else {}
