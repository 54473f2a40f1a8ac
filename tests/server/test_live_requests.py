"""The table of live sequences and the way of a message to its waiting call."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jaxserve.data_parallel import Replica, Ticket
from jaxserve.messages import BatchStrOut, TokenLogprobs
from jaxserve.server.live_requests import CallFacts, GapBuffer, LiveCall, LiveSequence, LiveTable
from jaxserve.server.requests import GenerationChunk
from jaxserve.timeline import RequestTimes
from jaxserve.types import FinishReason

TICKET = Ticket(Replica(0), prompt_tokens=0, prefill_tokens=0, output_tokens=0)


def out(rids: list[str], texts: list[str], **fields: object) -> BatchStrOut:
    n = len(rids)
    ones = np.ones(n, np.int32)
    return BatchStrOut(
        rids=rids, texts=texts, token_ids=np.arange(n, dtype=np.int32), token_counts=ones,
        prompt_tokens=ones, completion_tokens=ones, cached_tokens=ones, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


class Recorded:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.num_ends = 0
        self._chunks: list[GenerationChunk] = []

    def call(self, num_sequences: int, *, received_s: float = 0.0) -> LiveCall:
        return LiveCall(self, num_sequences, CallFacts(received_s))

    def push(self, chunk: GenerationChunk) -> None:
        assert not self.num_ends
        self._chunks.append(chunk)

    def end(self) -> None:
        self.num_ends += 1

    def take(self) -> list[GenerationChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks


def table_of(call: LiveCall, *rids: str) -> LiveTable:
    table = LiveTable()
    for index, rid in enumerate(rids):
        table.add(LiveSequence(rid, index, call.facts, call, ticket=TICKET))
    return table


async def test_chunks_reach_the_sink_in_the_messages_turn() -> None:
    sink = Recorded()
    table = table_of(sink.call(2), "a", "b")
    for i in range(3):
        table.route(out(["a", "b"], [f"a{i}", f"b{i}"]))
    assert [c.text for c in sink.take()] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    table.route(out(["b", "a"], ["B", "A"], finished={0: FinishReason.stop(1), 1: FinishReason.stop(2)}))
    assert [(c.rid, c.text, c.finish_reason) for c in sink.take()] == [
        ("b", "B", FinishReason.stop(1)),
        ("a", "A", FinishReason.stop(2)),
    ]
    assert sink.num_ends == 1
    assert len(table) == 0


async def test_held_chunks_are_merged_and_released_in_order() -> None:
    """What a process that fell behind does with all messages of a turn: fewer events, nothing lost."""
    sink = Recorded()
    table = table_of(sink.call(2), "a", "b")
    for i in range(3):
        table.route(out(["a", "b"], [f"a{i}", f"b{i}"]), hold=True)
    table.route(out(["a"], ["A"], finished={0: FinishReason.stop(1)}), hold=True)
    assert sink.take() == []
    table.release()
    first, second = sink.take()
    assert (first.text, first.finish_reason, second.text) == ("a0a1a2A", FinishReason.stop(1), "b0b1b2")
    assert sink.num_ends == 0
    table.route(out(["b"], ["B"]), hold=True)
    table.end_all(FinishReason.abort("over", 500))
    assert [(c.text, c.finish_reason) for c in sink.take()] == [("B", None), ("", FinishReason.abort("over", 500))]
    table.release()
    assert (sink.take(), sink.num_ends) == ([], 1)


async def test_unknown_and_abandoned_rows_are_dropped() -> None:
    sink = Recorded()
    table = table_of(sink.call(1), "a")
    sequence = LiveSequence("gone", 0, CallFacts(0.0), None, ticket=TICKET)
    table.add(sequence)
    table.route(out(["x", "gone", "a"], ["x", "g", "a"], finished={1: FinishReason.abort("bye")}))
    assert [c.text for c in sink.take()] == ["a"]
    assert not table.holds(sequence)
    assert len(table) == 1


async def test_a_rid_cannot_be_live_twice() -> None:
    table = table_of(Recorded().call(1), "a")
    with pytest.raises(AssertionError, match="already live"):
        table.add(LiveSequence("a", 0, CallFacts(0.0), None))


@pytest.mark.parametrize("hold", [False, True])
async def test_vectors_reach_the_chunk(hold: bool) -> None:
    sink, vectors = Recorded(), np.ones((1, 3), np.float32)
    table = table_of(sink.call(2), "a", "b")
    ends = {0: FinishReason.length_limit(0), 1: FinishReason.abort("bye")}
    table.route(out(["a", "b"], ["", ""], finished=ends, pooled={0: vectors}), hold=hold)
    table.release()
    assert [(c.rid, c.pooled) for c in sink.take()] == [("a", vectors), ("b", None)]


async def test_times_and_logprobs_reach_the_chunk() -> None:
    sink = Recorded()
    table = table_of(sink.call(1, received_s=100.0), "a")
    logprobs = TokenLogprobs(
        logprobs=np.array([-1.0], np.float32), top_ids=np.array([[7, 8]], np.int32),
        top_logprobs=np.array([[-0.5, -2.0]], np.float32),
    )  # fmt: skip
    times = RequestTimes(queue_entry_s=101, first_scheduled_s=103, first_token_s=104, finished_s=110, num_retractions=2)
    message = out(["a"], ["t"], finished={0: FinishReason.stop(0)}, logprobs={0: logprobs}, times={0: times})
    message.completion_tokens = np.array([4], np.int32)
    table.route(message)
    (chunk,) = sink.take()
    assert chunk.logprobs[0].top == [(7, -0.5), (8, -2.0)]
    assert (chunk.meta["queue_time"], chunk.meta["first_token_latency"], chunk.meta["num_retractions"]) == (2, 4, 2)
    assert chunk.meta["decode_throughput"] == 0.5


@pytest.mark.parametrize("hold", [False, True])
async def test_tokens_and_logprobs_may_stay_arrays(hold: bool) -> None:
    sink = Recorded()
    call = LiveCall(sink, 2, CallFacts(0.0, as_arrays=True))
    table = table_of(call, "a", "b")
    for end in ({}, {0: FinishReason.stop(1)}):
        message = out(["a", "b"], ["x", "y"], finished=end, logprobs={0: TokenLogprobs(logprobs=np.array([-1.0], np.float32))})
        table.route(message, hold=hold)
    table.release()
    chunks = sink.take()
    assert all(not chunk.token_ids and not chunk.logprobs for chunk in chunks)
    parts = [part for chunk in chunks if chunk.rid == "a" for part in chunk.parts]
    assert [part.token_ids.tolist() for part in parts] == [[0], [0]]
    assert [part.logprobs.logprobs.tolist() for part in parts if part.logprobs] == [[-1.0], [-1.0]]
    assert [part.logprobs for chunk in chunks if chunk.rid == "b" for part in chunk.parts] == [None, None]
    assert [chunk.finish_reason for chunk in chunks if chunk.rid == "a"][-1] == FinishReason.stop(1)


async def test_ending_everything_from_this_side() -> None:
    sink = Recorded()
    table = table_of(sink.call(2), "a", "b")
    table.end_all(FinishReason.abort("over", 500))
    assert [c.finish_reason for c in sink.take()] == [FinishReason.abort("over", 500)] * 2
    assert sink.num_ends == 1


async def test_routing_costs_little() -> None:
    """256 streaming sequences, one token each: a fraction of a decode step."""
    sinks = [Recorded() for _ in range(256)]
    table = LiveTable()
    for i, sink in enumerate(sinks):
        call = sink.call(1)
        table.add(LiveSequence(f"r{i}", 0, call.facts, call, ticket=TICKET))
    message = out([f"r{i}" for i in range(256)], ["x"] * 256)
    costs_s = []
    for _ in range(20):
        started_s = time.perf_counter()
        table.route(message)
        for sink in sinks:
            sink.take()
        costs_s.append(time.perf_counter() - started_s)
    assert sorted(costs_s)[10] < 0.02, f"median {sorted(costs_s)[10] * 1e3:.2f} ms"
    print(f"256 rows: median {sorted(costs_s)[10] * 1e3:.2f} ms")


async def test_gaps_between_tokens_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every token but a sequence's first; rows with the same gap share an entry."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    here, there = GapBuffer(), GapBuffer()
    table, call = LiveTable(), Recorded().call(1)
    for rid, gaps in (("a", here), ("b", here), ("c", there), ("d", here), ("silent", None)):
        table.add(LiveSequence(rid, 0, call.facts, call, ticket=TICKET, gaps=gaps))

    def told(rids: str, counts: list[int], so_far: list[int], at_s: float) -> None:
        nonlocal now_s
        now_s = at_s
        names = ["silent" if name == "s" else name for name in rids]
        message = out(names, ["x"] * len(names))
        message.token_counts, message.completion_tokens = np.array(counts), np.array(so_far)
        message.token_ids = np.zeros(sum(counts), np.int32)
        table.route(message)

    told("abcds", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 10.0)
    assert not here.times and not there.times
    told("abcs", [1, 1, 1, 1], [2, 2, 2, 2], 12.0)
    assert (here.seconds, here.times, there.seconds, there.times) == ([2.0], [2], [2.0], [1])
    told("abd", [4, 4, 1], [6, 6, 2], 14.0)
    assert (here.seconds[1:], here.times[1:]) == ([0.5, 4.0], [8, 1])
    told("dab", [1, 0, 1], [3, 6, 7], 15.0)
    assert (here.seconds[3:], here.times[3:]) == ([1.0], [2])
