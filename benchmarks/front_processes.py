"""What front processes carry (--tokenizer-worker-num): streams, and short requests with prompts to tokenize.

    python -m benchmarks.front_processes [--fronts 1 2 4] [--detokenizers 1] [--api chat native] [--rounds 3] [--step-s 0.001]

The device is `benchmarks.timed_device`, the clients are `benchmarks.streaming_client`, in processes of their own, and a server
of each kind is asked in turns. Prints, as medians of rounds: tokens or requests per second by the clock; the CPU time of each
process for 1,000 tokens or for a request, of several fronts or detokenizers the busiest's; what the fronts carry; and how many
times what the first server's carry in the same round. With one front the main process is it.

If each process has a core, the device is so fast that fronts bind, and what they carry is by the clock. On fewer cores it is
what they would carry with a core each: all that was asked for, per second of CPU time of the busiest front. Fronts that have to
wait for a core merge a stream's tokens into fewer events, which is cheaper: take longer steps there, so that events per token
are near 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.streaming import TimedServer, serving, start_clients
from benchmarks.timed_device import MAX_ROWS
from jaxserve.demo import demo_model_path
from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER
from jaxserve.server.fronts.board import Board
from jaxserve.server.tokenizer import Tokenizer

_MAIN, _CLIENTS = "main", "clients"
_QUESTION = "asks " + 10 * (
    "what the river says to the sea, who built the old bridge over it, and why nobody walks there when winter comes. "
)
_SHORT_TOKENS, _WARM_UP_TOKENS = 16, 32
_CLOSING_S = 5.0  # how long fronts may take to see that their clients are gone


@dataclasses.dataclass(frozen=True)
class Workload:
    name: str
    load: dict[str, Any]
    unit: str  # what is counted
    units_shown: int  # CPU times are shown of so many

    def warming_up(self) -> Workload:
        return dataclasses.replace(self, load=self.load | {"num_tokens": _WARM_UP_TOKENS, "num_requests": 1})


def workloads(num_tokens: int, num_requests: int) -> list[Workload]:
    short = {"stream": False, "num_tokens": _SHORT_TOKENS, "num_requests": num_requests, "question": _QUESTION}
    return [Workload("streams", {"num_tokens": num_tokens}, "tokens", 1000), Workload("short", short, "requests", 1)]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One run."""

    per_s: float  # units, by the clock
    events_per_token: float
    cpu_us: dict[str, float]  # per unit; by kind of process, of several the busiest's
    connections: tuple[int, ...]  # of each front; empty: the main process is the only one

    def carries_per_s(self, *, by_clock: bool) -> float:
        return self.per_s if by_clock else 1e6 / self.cpu_us[FRONT]

    @property
    def next_bottleneck(self) -> tuple[str, float]:
        """What binds when there are fronts enough, and what that carries per second."""
        others = {kind: cpu_us for kind, cpu_us in self.cpu_us.items() if kind not in (FRONT, _CLIENTS)}
        kind = max(others, key=lambda kind: others[kind])
        return kind, 1e6 / others[kind]


class Shape(NamedTuple):
    """Of a server."""

    fronts: int
    detokenizers: int


class FrontServer:
    def __init__(self, server: TimedServer, shape: Shape, num_clients: int, num_client_processes: int) -> None:
        self._server = server
        self._num_clients = num_clients
        self._client_shares = [len(range(i, num_clients, num_client_processes)) for i in range(num_client_processes)]
        self._fronts = range(shape.fronts if shape.fronts > 1 else 0)
        self._board = Board(server.folder, None, shape.fronts, 1) if self._fronts else None

    def ask(self, work: Workload, api: str) -> Sample:
        before, closed = self._server.cpu_s(), self._closed()
        results = self._ask(work.load | {"api": api})
        cpu_s = {name: cpu_s - before[name] for name, cpu_s in self._server.cpu_s().items()}
        cpu_s[_CLIENTS] = sum(result["client_cpu_s"] for result in results)
        num_units = sum(result["num_tokens" if work.unit == "tokens" else "num_replies"] for result in results)
        took_s = max(result["ended_s"] for result in results) - min(result["began_s"] for result in results)
        events_per_token = statistics.mean(result["events_per_token"] for result in results)
        cpu_us = {kind: one_s / num_units * 1e6 for kind, one_s in _by_kind(cpu_s).items()}
        return Sample(num_units / took_s, events_per_token, cpu_us, self._connections_since(closed))

    def _ask(self, load: dict[str, Any]) -> list[dict[str, Any]]:
        """What each process of clients saw."""
        processes = [start_clients(self._server, **load, num_clients=share) for share in self._client_shares]
        results = [json.loads(process.communicate()[0]) for process in processes]
        seen = {status for result in results for status in result["statuses"]}
        assert seen == {"ended"}, f"some clients did not get their replies: {seen}"
        return results

    def _closed(self) -> list[int]:
        return [] if self._board is None else [self._board.num_closed(front) for front in self._fronts]

    def _connections_since(self, before: list[int]) -> tuple[int, ...]:
        """How many of the clients each front has had."""
        deadline_s = time.monotonic() + _CLOSING_S
        while True:
            had = tuple(now - then for now, then in zip(self._closed(), before, strict=True))
            if not had or sum(had) == self._num_clients:
                return had
            assert time.monotonic() < deadline_s, f"{self._num_clients} clients, of whom fronts had {had}"
            time.sleep(0.01)


def _by_kind(cpu_s: Mapping[str, float]) -> dict[str, float]:
    """The busiest's of each kind; a main process without fronts is one."""
    busiest: dict[str, float] = {}
    for name, one_s in cpu_s.items():
        kind = name.split()[0]
        busiest[kind] = max(busiest.get(kind, 0.0), one_s)
    if FRONT not in busiest:
        busiest[FRONT] = busiest.pop(_MAIN)
    return busiest


def median_of(samples: Sequence[Sample]) -> Sample:
    """Of each number; the connections are of the round that shared them least evenly."""
    return Sample(
        statistics.median(one.per_s for one in samples),
        statistics.median(one.events_per_token for one in samples),
        {kind: statistics.median(one.cpu_us[kind] for one in samples) for kind in samples[0].cpu_us},
        max((one.connections for one in samples), key=lambda had: max(had, default=0) - min(had, default=0)),
    )


def times_first(samples: Sequence[Sample], first: Sequence[Sample], *, by_clock: bool) -> float:
    """What is carried, as a multiple of what the first server carries; of rounds the median."""
    pairs = zip(samples, first, strict=True)
    return statistics.median(one.carries_per_s(by_clock=by_clock) / of.carries_per_s(by_clock=by_clock) for one, of in pairs)


def report(work: Workload, api: str, rounds: Mapping[Shape, Sequence[Sample]], *, by_clock: bool) -> None:
    is_streams = work.unit == "tokens"
    cpu = "CPU in ms for 1,000 tokens" if is_streams else "CPU in us for a request"
    scale, digits = (work.units_shown / 1000, 1) if is_streams else (1, 0)
    print(
        f"\n{work.name}, {api}; {cpu}\nfronts  detok.{work.unit + '/s':>12}  events/token   front    main  scheduler  detok."
        "  clients    carry  times first  next bottleneck carries  connections"
    )
    for shape, samples in rounds.items():
        one = median_of(samples)
        events = f"{one.events_per_token:.3f}" if is_streams else "-"
        kinds = {FRONT: 8, _MAIN: 8, SCHEDULER: 11, DETOKENIZER: 8, _CLIENTS: 9}
        times = "".join(
            f"{one.cpu_us[kind] * scale:{width}.{digits}f}" if kind in one.cpu_us else f"{'-':>{width}}"
            for kind, width in kinds.items()
        )
        times_as_much = times_first(samples, next(iter(rounds.values())), by_clock=by_clock)
        kind, binds_at = one.next_bottleneck
        print(
            f"{shape.fronts:>6}{shape.detokenizers:>8}{one.per_s:>12,.0f}{events:>14}{times}"
            f"{one.carries_per_s(by_clock=by_clock):>9,.0f}{times_as_much:>13.2f}{f'{kind} {binds_at:,.0f}':>25}"
            f"  {' '.join(map(str, one.connections)) or '-'}",
            flush=True,
        )


def clock_counts(shapes: Sequence[Shape], client_processes: int) -> bool:
    """Says so, too."""
    with_main = max(shape.fronts + (shape.fronts > 1) + shape.detokenizers for shape in shapes)
    num_processes, num_cores = with_main + 1 + client_processes, os.cpu_count() or 1
    by_clock = num_cores >= num_processes
    what = (
        "what fronts carry is by the clock"
        if by_clock
        else "too few, so what fronts carry is PER SECOND OF CPU TIME of the busiest"
    )
    print(f"{num_cores} cores for {num_processes} processes: {what}")
    return by_clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2, 4], help="--tokenizer-worker-num of each server")
    parser.add_argument("--detokenizers", type=int, nargs="+", default=[1], help="--detokenizer-worker-num of each")
    parser.add_argument("--api", nargs="+", default=["chat", "native"], help="native, completions, chat")
    parser.add_argument("--workloads", nargs="+", default=["streams", "short"], help="streams, short")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, in turns")
    parser.add_argument("--clients", type=int, default=MAX_ROWS, help="clients at once")
    parser.add_argument("--client-processes", type=int, default=1, help="which share the clients")
    parser.add_argument("--tokens", type=int, default=400, help="new tokens of a stream")
    parser.add_argument("--requests", type=int, default=8, help="short requests of each client")
    parser.add_argument("--step-s", type=float, default=0.001, help="time of a device step")
    args = parser.parse_args()
    shapes = [Shape(*both) for both in itertools.product(args.fronts, args.detokenizers)]
    by_clock = clock_counts(shapes, args.client_processes)
    prompt_len = len(Tokenizer.load(demo_model_path(), hide_torch=True).encode(_QUESTION))
    print(
        f"{args.clients} clients, device steps of {args.step_s * 1e3:g} ms, streams of {args.tokens} tokens, "
        f"short requests with {prompt_len} prompt tokens and {_SHORT_TOKENS} new ones, {args.rounds} rounds"
    )
    with contextlib.ExitStack() as stack:
        servers = {}
        for shape in shapes:
            options = {"tokenizer_worker_num": shape.fronts, "detokenizer_worker_num": shape.detokenizers}
            server = stack.enter_context(serving(args.step_s, **options))
            servers[shape] = FrontServer(server, shape, args.clients, args.client_processes)
        for work, api in itertools.product(workloads(args.tokens, args.requests), args.api):
            if work.name not in args.workloads:
                continue
            for one in servers.values():  # the first requests of a process cost more
                one.ask(work.warming_up(), api)
            rounds: dict[Shape, list[Sample]] = {shape: [] for shape in shapes}
            for _, shape in itertools.product(range(args.rounds), shapes):
                rounds[shape].append(servers[shape].ask(work, api))
            report(work, api, rounds, by_clock=by_clock)


if __name__ == "__main__":
    main()
