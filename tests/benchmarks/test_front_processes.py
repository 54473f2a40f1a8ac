"""Clients see where a reply ends, whichever pieces it comes in; what fronts carry goes by the clock or by the busiest's time.

`python -m benchmarks.front_processes` runs it against servers.
"""

from __future__ import annotations

import socket

import pytest

from benchmarks.front_processes import Sample, Shape, Workload, median_of, report, times_first
from benchmarks.streaming_client import Client

_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n"


@pytest.mark.parametrize(
    "pieces", [(_REPLY + b'{"text": ""}',), (_REPLY, b'{"text": ""}'), (_REPLY + b'{"te', b"xt", b'": ""}')]
)
def test_a_whole_reply_ends_where_its_length_says(pieces: tuple[bytes, ...]) -> None:
    with socket.socket() as connection:
        client = Client(connection, 0)
        for _ in range(2):  # on one connection
            assert [client.ends_whole(memoryview(piece)) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        with pytest.raises(RuntimeError, match="503"):
            client.ends_whole(memoryview(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"))


def sample(front_us: float, per_s: float, *connections: int, **others_us: float) -> Sample:
    cpu_us = {"front": front_us, "scheduler": 5.0, "detokenizer": 4.0, "clients": 90.0}
    return Sample(per_s, 1.0, cpu_us | others_us, connections)


def test_what_fronts_carry() -> None:
    one = [sample(30.0, 10.0), sample(20.0, 12.0), sample(40.0, 11.0)]
    two = [sample(15.0, 11.0, 4, 4), sample(11.0, 18.0, 5, 3), sample(19.0, 11.0, 4, 4)]
    assert median_of(two).cpu_us["front"] == 15.0 and median_of(two).connections == (5, 3)
    assert times_first(two, one, by_clock=False) == 2.0  # of 2, 1.82 and 2.11
    assert times_first(two, one, by_clock=True) == 1.1
    assert two[0].next_bottleneck == ("scheduler", 200_000.0)
    assert sample(15.0, 11.0, 4, 4, main=8.0).next_bottleneck == ("main", 125_000.0)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {Shape(1, 1): [sample(30.0, 10.0)], Shape(2, 1): [sample(15.0, 11.0, 128, 128, main=1.0)]}
    report(Workload("streams", {}, "tokens", 1000), "chat", rounds, by_clock=False)
    first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-2:])
    assert first == "1 1 10 1.000 30.0 - 5.0 4.0 90.0 33,333 1.00 scheduler 200,000 -"
    assert second == "2 1 11 1.000 15.0 1.0 5.0 4.0 90.0 66,667 2.00 scheduler 200,000 128 128"
