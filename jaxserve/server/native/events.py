"""The events of a streamed POST /generate.

A cumulative event repeats the whole output. So that its cost does not grow with the Python objects in it, what an event repeats
is kept as JSON, to which each chunk adds; the events that hold more than that (the last one, logprobs) are made from the reply.
"""

from __future__ import annotations

import msgspec

from jaxserve.server.http.connection import DONE_EVENT, event
from jaxserve.server.native.job import NativeJob
from jaxserve.server.requests import GenerationChunk

_encode = msgspec.json.encode


class NativeEvents:
    def __init__(self, job: NativeJob) -> None:
        self._replies = job.streamed()
        self._with_index = job.native.is_list
        self._from_json = not (job.args.incremental_streaming_output or job.native.req.return_logprob)
        self._json: dict[int, _OutputJson] = {}  # by sequence
        self._weight_version = job.args.weight_version

    def push(self, chunk: GenerationChunk) -> bytes:
        if not self._from_json or chunk.finish_reason is not None:
            return event(_encode(self._replies.event(chunk)))
        self._replies.add(chunk)
        output = self._json.get(chunk.index)
        if output is None:
            output = self._json[chunk.index] = _OutputJson(self._weight_version, chunk.index if self._with_index else None)
        return output.event(chunk)

    def end(self) -> bytes:
        return DONE_EVENT


class _OutputJson:
    """What one sequence's unfinished events hold; the same bytes as those of `GenerateReply.to_dict`."""

    __slots__ = ("_after", "_before", "_ids", "_index", "_meta_of", "_text", "_weight_version")

    def __init__(self, weight_version: str, index: int | None) -> None:
        self._text = bytearray()
        self._ids = bytearray()
        self._weight_version = weight_version
        self._index = index
        self._meta_of: tuple[int, int, str] | None = None  # the counts and version that _before and _after hold
        self._before = self._after = b""  # meta_info but for completion_tokens

    def event(self, chunk: GenerationChunk) -> bytes:
        meta_of = (chunk.prompt_tokens, chunk.cached_tokens, chunk.weight_version)
        if meta_of != self._meta_of:
            self._meta_of = meta_of
            self._write_meta(chunk)
        if chunk.text:
            self._text += _encode(chunk.text)[1:-1]
        if chunk.token_ids:
            new_ids = _encode(chunk.token_ids)[1:-1]
            self._ids += b"," + new_ids if self._ids else new_ids
        return b"".join(
            (
                b'data: {"text":"',
                self._text,
                b'","output_ids":[',
                self._ids,
                self._before,
                b"%d" % chunk.completion_tokens,
                self._after,
            )
        )

    def _write_meta(self, chunk: GenerationChunk) -> None:
        before = {"id": chunk.rid, "finish_reason": None, "prompt_tokens": chunk.prompt_tokens}
        after = {"cached_tokens": chunk.cached_tokens, "weight_version": chunk.weight_version or self._weight_version}
        index = b"" if self._index is None else b',"index":%d' % self._index
        self._before = b'],"meta_info":' + _encode(before)[:-1] + b',"completion_tokens":'
        self._after = b"," + _encode(after)[1:] + index + b"}\n\n"
