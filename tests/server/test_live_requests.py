"""The table of live sequences and the way of a message to its waiting call."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jaxserve.messages import BatchStrOut, OutputLogprobs, RequestTimes
from jaxserve.server.live_requests import LiveCall, LiveSequence, LiveTable
from jaxserve.types import FinishReason


def out(rids: list[str], texts: list[str], **fields: object) -> BatchStrOut:
    n = len(rids)
    ones = np.ones(n, np.int32)
    return BatchStrOut(
        rids=rids, texts=texts, token_ids=np.arange(n, dtype=np.int32), token_counts=ones,
        prompt_tokens=ones, completion_tokens=ones, cached_tokens=ones, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def table_of(call: LiveCall, *rids: str) -> LiveTable:
    table = LiveTable()
    for index, rid in enumerate(rids):
        table.add(LiveSequence(rid, index, call, sent=True))
    return table


async def test_chunks_of_a_sequence_merge_until_they_are_taken() -> None:
    call = LiveCall(2, return_logprob=False, received_s=0.0)
    table = table_of(call, "a", "b")
    for i in range(3):
        table.route(out(["a", "b"], [f"a{i}", f"b{i}"]))
    first, second = await call.take()
    assert (first.text, second.text) == ("a0a1a2", "b0b1b2")
    assert first.token_ids == [0, 0, 0]
    table.route(out(["b", "a"], ["B", "A"], finished={0: FinishReason.stop(1), 1: FinishReason.stop(2)}))
    chunks = await call.take()
    assert [(c.rid, c.text, c.finish_reason) for c in chunks] == [
        ("b", "B", FinishReason.stop(1)),
        ("a", "A", FinishReason.stop(2)),
    ]
    assert await call.take() == []
    assert len(table) == 0


async def test_unknown_and_abandoned_rows_are_dropped() -> None:
    call = LiveCall(1, return_logprob=False, received_s=0.0)
    table = table_of(call, "a")
    sequence = LiveSequence("gone", 0, None, sent=True)
    table.add(sequence)
    table.route(out(["x", "gone", "a"], ["x", "g", "a"], finished={1: FinishReason.abort("bye")}))
    assert [c.text for c in await call.take()] == ["a"]
    assert not table.holds(sequence)
    assert len(table) == 1


async def test_a_rid_cannot_be_live_twice() -> None:
    table = table_of(LiveCall(1, return_logprob=False, received_s=0.0), "a")
    with pytest.raises(AssertionError, match="already live"):
        table.add(LiveSequence("a", 0, None))


async def test_times_and_logprobs_reach_the_chunk() -> None:
    call = LiveCall(1, return_logprob=True, received_s=100.0)
    table = table_of(call, "a")
    logprobs = OutputLogprobs(
        logprobs=np.array([-1.0], np.float32), top_ids=np.array([[7, 8]], np.int32),
        top_logprobs=np.array([[-0.5, -2.0]], np.float32),
    )  # fmt: skip
    times = RequestTimes(queue_entry_s=101, first_scheduled_s=103, first_token_s=104, finished_s=110, num_retractions=2)
    message = out(["a"], ["t"], finished={0: FinishReason.stop(0)}, logprobs={0: logprobs}, times={0: times})
    message.completion_tokens = np.array([4], np.int32)
    table.route(message)
    (chunk,) = await call.take()
    assert chunk.logprobs[0].top == [(7, -0.5), (8, -2.0)]
    assert (chunk.meta["queue_time"], chunk.meta["first_token_latency"], chunk.meta["num_retractions"]) == (2, 4, 2)
    assert chunk.meta["decode_throughput"] == 0.5


async def test_ending_everything_from_this_side() -> None:
    call = LiveCall(2, return_logprob=False, received_s=0.0)
    table = table_of(call, "a", "b")
    table.end_all(FinishReason.abort("over", 500))
    assert {c.finish_reason for c in await call.take()} == {FinishReason.abort("over", 500)}
    assert await call.take() == []


async def test_routing_costs_little() -> None:
    """256 streaming sequences, one token each: a fraction of a decode step."""
    calls = [LiveCall(1, return_logprob=False, received_s=0.0) for _ in range(256)]
    table = LiveTable()
    for i, call in enumerate(calls):
        table.add(LiveSequence(f"r{i}", 0, call, sent=True))
    message = out([f"r{i}" for i in range(256)], ["x"] * 256)
    costs_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        table.route(message)
        for call in calls:
            await call.take()
        costs_s.append(time.perf_counter() - started_s)
    assert sorted(costs_s)[10] < 0.02, f"median {sorted(costs_s)[10] * 1e3:.2f} ms"
    print(f"256 rows: median {sorted(costs_s)[10] * 1e3:.2f} ms")
