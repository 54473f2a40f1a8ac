"""The events of a streamed POST /generate.

What nearly all events hold is kept as JSON: the output, to which each chunk adds, and what stands around it, which changes at
the end only. So a cumulative event, which repeats the whole output, costs one copy of its bytes and no Python object per token.
Events that say more are made from the reply.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from jaxserve.server.http.connection import DONE_EVENT, event
from jaxserve.server.http.envelopes import NATIVE
from jaxserve.server.long_json import json_parts
from jaxserve.server.native.job import NativeJob
from jaxserve.server.native.replies import meta_info
from jaxserve.server.requests import GenerationChunk, RequestError, raise_if_failed

_encode = msgspec.json.encode


class NativeEvents:
    __slots__ = ("_job", "_outputs", "_replies")

    def __init__(self, job: NativeJob) -> None:
        self._job = job
        self._replies = job.streamed() if job.shows_more or job.native.return_prompt_token_ids else None
        self._outputs: dict[int, _OutputJson] = {}  # by sequence

    def push(self, chunk: GenerationChunk) -> bytes:
        if self._replies is not None:
            return b"".join(self.parts(chunk))
        if chunk.finish_reason is not None:
            raise_if_failed(chunk)
        output = self._outputs.get(chunk.index)
        if output is None:
            output = self._outputs[chunk.index] = self._begin(chunk.index)
        return output.event(chunk)

    def parts(self, chunk: GenerationChunk) -> Iterator[bytes]:
        """Of an event that shows more than the output."""
        assert self._replies is not None, "an event of outputs alone is short"
        yield b"data: "
        yield from json_parts(self._replies.event(chunk))
        yield b"\n\n"

    def num_numbers(self, chunk: GenerationChunk) -> int:
        """Of this chunk and, since they may be repeated, of all before it."""
        return chunk.num_numbers + (0 if self._replies is None else self._replies.num_numbers)

    def end(self) -> bytes:
        return DONE_EVENT

    def error(self, error: RequestError) -> bytes:
        return event(_encode(NATIVE.body(error))) + DONE_EVENT

    def _begin(self, index: int) -> _OutputJson:
        args = self._job.args
        return _OutputJson(
            args.weight_version, index if self._job.native.is_list else None, incremental=args.incremental_streaming_output
        )


class _OutputJson:
    """One sequence's events; the same bytes as those of GenerateReply's dicts."""

    __slots__ = ("_after", "_before", "_end", "_ids", "_incremental", "_meta_of", "_text", "_weight_version")

    def __init__(self, weight_version: str, index: int | None, *, incremental: bool) -> None:
        self._text = bytearray()
        self._ids = bytearray()
        self._weight_version = weight_version
        self._incremental = incremental
        self._end = b"}\n\n" if index is None else b',"index":%d}\n\n' % index
        self._meta_of: tuple[int, int, str] | None = None  # what _before and _after depend on
        self._before = self._after = b""  # what stands around completion_tokens

    def event(self, chunk: GenerationChunk) -> bytes:
        text, ids = self._text, self._ids
        if chunk.text:
            text += _encode(chunk.text)[1:-1]
        if chunk.token_ids:
            if ids:
                ids += b","
            ids += _encode(chunk.token_ids)[1:-1]
        whole = b"".join((b'data: {"text":"', text, b'","output_ids":[', ids, self._meta(chunk)))
        if self._incremental:
            text.clear()
            ids.clear()
        return whole

    def _meta(self, chunk: GenerationChunk) -> bytes:
        """From the end of the ids to the end of the event."""
        if chunk.finish_reason is not None:
            return b'],"meta_info":' + _encode(meta_info(chunk, self._weight_version)) + self._end
        meta_of = (chunk.prompt_tokens, chunk.cached_tokens, chunk.weight_version)
        if meta_of != self._meta_of:
            self._meta_of = meta_of
            count = b'"completion_tokens":%d' % chunk.completion_tokens  # not in a string: its quotes would be escaped
            before, _, after = _encode(meta_info(chunk, self._weight_version)).partition(count)
            self._before = b'],"meta_info":' + before + b'"completion_tokens":'
            self._after = after + self._end
        return b"%b%d%b" % (self._before, chunk.completion_tokens, self._after)
