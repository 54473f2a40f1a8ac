"""Where a request's chunks go: a sink takes each as it arrives, on the loop, in the message's own turn.

    BatchStrOut -> LiveTable.route -> ChunkSink.push

A stream's sink writes to its connection (`jaxserve.server.http.event_stream`). WaitingChunks is that of whoever asks for chunks
when it wants them: `pulled`, the Engine.

A sink never waits. One whose reader is slower than the model merges what waits, one chunk per sequence, so it holds at most one
output's worth of memory per sequence.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from jaxserve.server.requests import GenerateReqInput, GenerationChunk, raise_if_failed


class ChunkSink(Protocol):
    def push(self, chunk: GenerationChunk) -> None:
        """The next chunk of one of the sequences. Must neither wait nor raise."""

    def end(self) -> None:
        """Every sequence has had its last chunk."""


# Sends a request whose chunks go to the sink. Entering raises RequestError for bad input; leaving aborts what still runs.
OpenStream = Callable[[GenerateReqInput, ChunkSink], AbstractAsyncContextManager[None]]


class ChunkMerger:
    """The chunks that wait, at most one per sequence."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[int, GenerationChunk] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, chunk: GenerationChunk) -> None:
        earlier = self._waiting.get(chunk.index)
        if earlier is None:
            self._waiting[chunk.index] = chunk
        else:
            _merge(earlier, chunk)

    def take(self) -> list[GenerationChunk]:
        chunks, self._waiting = list(self._waiting.values()), {}
        return chunks


def _merge(into: GenerationChunk, later: GenerationChunk) -> None:
    into.text += later.text
    into.token_ids.extend(later.token_ids)
    into.logprobs.extend(later.logprobs)
    into.completion_tokens = later.completion_tokens
    into.cached_tokens = later.cached_tokens
    into.finish_reason = later.finish_reason
    into.meta = later.meta
    into.weight_version = later.weight_version
    if later.input_logprobs is not None:
        into.input_logprobs = later.input_logprobs
    into.hidden_states.extend(later.hidden_states)
    into.experts.extend(later.experts)
    into.parts.extend(later.parts)
    if later.pooled is not None:
        into.pooled = later.pooled


class WaitingChunks:
    """A sink for one reader, on any thread or loop: `wake` is called when there is something to take."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._merger = ChunkMerger()
        self._ended = False

    def push(self, chunk: GenerationChunk) -> None:
        with self._lock:
            was_empty = not self._merger
            self._merger.add(chunk)
        if was_empty:
            self._wake()

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._wake()

    def take(self) -> tuple[list[GenerationChunk], bool]:
        """(what waits, whether that is the end of it)"""
        with self._lock:
            return self._merger.take(), self._ended


async def pulled(open_stream: OpenStream, req: GenerateReqInput) -> AsyncGenerator[GenerationChunk, None]:
    """The chunks of all sequences as they come, for a reader on the loop; ends when each had its last one.

    Raises RequestError before the first chunk for bad input and for a request that the scheduler refused. Closing the
    generator early aborts what still runs.
    """
    arrived = asyncio.Event()
    waiting = WaitingChunks(arrived.set)
    started = ended = False
    async with open_stream(req, waiting):
        while not ended:
            await arrived.wait()
            arrived.clear()
            chunks, ended = waiting.take()
            for chunk in chunks:
                if not started and not chunk.completion_tokens:
                    raise_if_failed(chunk)  # ended before its first token: an error reply, not a generation
                started = True
                yield chunk
