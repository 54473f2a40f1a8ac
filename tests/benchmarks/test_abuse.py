"""What the fuzzing mix makes of replies, waits and memory; the mix itself runs in tests/e2e/test_live_abuse.py."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.abuse.arena import Arena
from benchmarks.abuse.connection import Reply, parse_reply
from benchmarks.abuse.hostile import Raw, encode, mutated
from benchmarks.abuse.measures import Measures, growth, growth_faults, percentile, phases, witness_faults
from benchmarks.abuse.tally import Tally


@pytest.fixture
def arena() -> Arena:
    return Arena(1, Tally(), {}, {}, {})


def judged(arena: Arena, reply: Reply) -> list[str]:
    arena.judge("kind", b"request", reply)
    return [example.what for example in arena.tally.examples]


def test_a_chunked_reply_is_put_together() -> None:
    data = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    reply = parse_reply(
        data + b"6\r\ndata: \r\na\r\n[DONE]\n\n\r\n\r\n0\r\n\r\n".replace(b"a\r\n[DONE]\n\n\r\n", b"8\r\n[DONE]\n\n\r\n")
    )
    assert reply == Reply(200, "text/event-stream", b"data: [DONE]\n\n", True)
    assert parse_reply(b"nonsense").status is None


@pytest.mark.parametrize(
    ("status", "body", "faults"),
    [
        (200, b"{}", []),
        (400, b'{"error": {"message": "top_p must be in (0, 1]; got 2"}}', []),
        (400, b"{}", ["a refusal without a sentence"]),
        (500, b'{"error": {"message": "oops"}}', ["status 500"]),
        (503, b'{"error": {"message": "The queue is full"}}', []),
        (503, b'{"error": {"message": "oops"}}', ["status 503"]),
    ],
)
def test_replies_are_judged(arena: Arena, status: int, body: bytes, faults: list[str]) -> None:
    assert judged(arena, Reply(status, "application/json", body, True)) == faults


def test_a_stream_must_end_and_a_connection_must_bring_a_reply(arena: Arena) -> None:
    assert judged(arena, Reply(200, "text/event-stream; charset=utf-8", b"data: 1\n\ndata: [DONE]\n\n", True)) == []
    twice = b"data: [DONE]\n\ndata: [DONE]\n\n"
    for body in (b"data: 1\n\n", twice, b"data: [DONE]\n\ndata: 1\n\n"):
        assert judged(arena, Reply(200, "text/event-stream; charset=utf-8", body, True))[-1] == "a stream without its one end"
    assert len(arena.tally.examples) == 3
    assert judged(arena, Reply(None, "", b"", True))[-1] == "closed without a reply"


def test_while_the_server_is_killed_nothing_fails(arena: Arena) -> None:
    arena.away = True
    assert judged(arena, Reply(500, "application/json", b"", False)) == []
    arena.failed("kind", "no connection")
    assert arena.tally.outcomes["kind"]["away"] == 2


def test_values_that_json_has_no_word_for_stand_as_they_are() -> None:
    assert encode({"a": Raw("1e999"), "b": [Raw('"\\ud800"')], "c": "x"}) == b'{"a": 1e999, "b": ["\\ud800"], "c": "x"}'


def test_mutations_follow_the_seed() -> None:
    body = {"text": "a", "sampling_params": {"top_p": 1}}
    once = [mutated(body, ["rid"], random.Random(seed)) for seed in range(200)]
    assert once == [mutated(body, ["rid"], random.Random(seed)) for seed in range(200)]
    assert len(set(once)) > 150
    assert body == {"text": "a", "sampling_params": {"top_p": 1}}
    assert sum(data != json.dumps(body).encode() for data in once) > 190


def record(at_s: float, ttft_s: float, outcome: str = "whole") -> dict[str, object]:
    ok = outcome == "whole"
    return {
        "at_s": at_s,
        "ended_s": at_s + 1,
        "kind": "short",
        "ok": ok,
        "outcome": outcome,
        "ttft_s": ttft_s,
        "gaps_s": [0.01],
    }


def test_waits_in_a_disturbance_do_not_count() -> None:
    measures = Measures(marks=[("alone", 0), ("mixed", 100), ("end", 200)], disturbances=[(150, 155)])
    records = [
        record(10, 0.1),
        *(record(101 + i, 0.2) for i in range(20)),
        record(152, 9, "aborted"),
        record(160, 1, "503 full"),
    ]
    assert witness_faults(measures, records) == []
    assert phases(measures, records)["mixed"]["ttft_p50_ms"] == 200
    assert phases(measures, records)["alone"]["requests"] == 1
    assert witness_faults(measures, [*records, record(170, 8)]) == [
        "the witness's ttft_p99_ms beside the abuse is 8000; at most 5000"
    ]
    assert "no [DONE]" in witness_faults(measures, [*records, record(190, 0.1, "no [DONE]")])[0]


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 99) is None
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(range(1, 101), 99) == 99


def test_memory_that_grows_is_a_fault_if_the_server_lived_long_enough() -> None:
    def life(start: int, seconds: int, growth_mb_per_s: float) -> list[tuple[float, int, dict[str, float]]]:
        return [(1000.0 * start + s, start, {"main": 100 + growth_mb_per_s * s, "scheduler": 500}) for s in range(seconds)]

    found = growth(Measures(memory=[*life(1, 300, 0.0), *life(2, 600, 1.0), *life(3, 60, 10.0)]))
    assert [(record["start"], record["process"], record["judged"]) for record in found if record["process"] == "main"] == [
        (1, "main", True), (2, "main", True), (3, "main", False),
    ]  # fmt: skip
    assert found[2]["mb_per_hour"] == 3600
    assert len(growth_faults(found)) == 1
    assert growth_faults(found)[0].startswith("main grew from 324 to 624 MiB")


@pytest.mark.parametrize(
    ("body", "has_end"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"data: {}\n\n", False),
        (b"data: [DONE]\n\ndata: [DONE]\n\n", False),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (b'event: error\ndata: {"type":"error","error":{}}\n\n', True),
        (b'event: response.completed\ndata: {"type":"response.completed","sequence_number":9}\n\n', True),
        (b'event: error\ndata: {"type":"error","sequence_number":9}\n\n', False),
        (b'event: ping\ndata: {"type":"ping"}\n\n', False),
        (b'{"model":"m","created_at":"","done":false}\n{"model":"m","created_at":"","done":true}\n', True),
        (b'{"model":"m","created_at":"","done":false}\n{"error":"x"}\n', True),
        (b'{"model":"m","created_at":"","done":false}\n', False),
        (b"", False),
    ],
)
def test_each_protocols_streams_have_one_end(arena: Arena, body: bytes, has_end: bool) -> None:
    faults = judged(arena, Reply(200, "text/event-stream", body, True))
    assert faults == ([] if has_end else ["a stream without its one end"])
