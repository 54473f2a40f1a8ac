"""Sinks: what waits for a slow reader is merged, and what is taken is all of it."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import numpy as np

from jaxserve.messages import HiddenStates
from jaxserve.server.requests import GenerationChunk, TokenLogprob
from jaxserve.server.sinks import ChunkMerger, WaitingChunks
from jaxserve.types import FinishReason


def chunk(text: str, token: int, *, index: int = 0, reason: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk(index, f"r{index}", text, [token], [TokenLogprob(token, -0.5, [])], 3, token, 0, reason)


def test_chunks_of_a_sequence_merge_until_they_are_taken() -> None:
    merger = ChunkMerger()
    states = [HiddenStates(outputs=np.full((1, 2), token, np.float32)) for token in range(3)]
    for token in range(3):
        merger.add(chunk(f"a{token}", token))
        merger.add(msgspec.structs.replace(chunk("", token, index=2), hidden_states=[states[token]]))
        merger.add(chunk(f"b{token}", token, index=1))
    first, third, second = merger.take()
    assert (first.text, second.text) == ("a0a1a2", "b0b1b2")
    assert (first.token_ids, first.completion_tokens) == ([0, 1, 2], 2)
    assert [entry.token_id for entry in first.logprobs] == [0, 1, 2]
    assert third.hidden_states == states
    assert not merger
    vectors = np.ones((1, 2), np.float32)
    merger.add(chunk("", 1, index=3))
    merger.add(msgspec.structs.replace(chunk("", 2, index=3), pooled=vectors))
    assert [c.pooled is vectors for c in merger.take()] == [True]
    merger.add(chunk("B", 9, index=1, reason=FinishReason.stop(1)))
    assert [(c.rid, c.text, c.finish_reason) for c in merger.take()] == [("r1", "B", FinishReason.stop(1))]


async def test_a_reader_is_woken_once_for_what_waits() -> None:
    wakes: list[int] = []
    waiting = WaitingChunks(lambda: wakes.append(1))
    for token in range(5):
        waiting.push(chunk("x", token))
    assert len(wakes) == 1
    (merged,), ended = waiting.take()
    assert (merged.text, ended) == ("xxxxx", False)
    assert waiting.take() == ([], False)
    waiting.push(chunk("y", 5))
    waiting.end()
    (last,), ended = waiting.take()
    assert (last.text, ended) == ("y", True)


async def test_nothing_is_lost_between_two_threads() -> None:
    news = threading.Event()
    waiting = WaitingChunks(news.set)
    read: list[int] = []

    def reader() -> None:
        ended = False
        while not ended:
            news.wait()
            news.clear()
            chunks, ended = waiting.take()
            for one in chunks:
                read.extend(one.token_ids)

    thread = threading.Thread(target=reader)
    thread.start()
    for token in range(20_000):
        waiting.push(chunk("x", token))
    waiting.end()
    await asyncio.to_thread(thread.join, 10)
    assert read == list(range(20_000))
