"""Simulation: many replicas and what is sent to them, in the order of virtual time.

Each replica has a clock. Always whoever is furthest behind goes on: the next arrival, the next news for the controller, or
the replica whose clock shows the least. So a request is dispatched by what was known at its time, and a replica sees it in the
round that begins after it came.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable

from jaxserve.bench.simulate.replica import SimulatedReplica
from jaxserve.bench.simulate.report import Report
from jaxserve.bench.simulate.step_times import StageTimes
from jaxserve.bench.simulate.workload import Arrival
from jaxserve.config import ServerArgs
from jaxserve.data_parallel import DataParallelController, Prompt, Ticket, make_policy
from jaxserve.messages import BatchTokenIDOut, TokenizedGenerateReqInput
from jaxserve.runner import RunnerSpec
from jaxserve.types import SamplingParams

_ONLY_FIRST_AND_LAST = 1 << 30  # --stream-interval of the requests: between them nobody listens


@dataclasses.dataclass(slots=True)
class _Live:
    arrival: Arrival
    ticket: Ticket
    first_s: float = 0.0  # when its first token was seen


class Simulation:
    def __init__(
        self,
        args: ServerArgs,
        spec: RunnerSpec,
        stage_times: StageTimes,
        *,
        host_s: float = 3e-4,
        path_s: float = 2e-3,
        on_served: Callable[[], object] = lambda: None,
    ) -> None:
        """`args`: of the server; of them --dp-size and the scheduler's count. `host_s`: of a scheduler's round; `path_s`: what
        a request's way in and its texts' way out take together."""
        policy = make_policy(args.load_balance_method, args.dp_size, has_prefix_cache=not args.disable_radix_cache)
        self._controller = DataParallelController(policy, args.dp_size)
        self._path_s = path_s
        self._on_served = on_served
        self._live: dict[str, _Live] = {}
        self._news: list[tuple[float, int, BatchTokenIDOut]] = []  # a heap
        self._numbers = itertools.count()
        self.report = Report(args.dp_size)
        self._replicas = [SimulatedReplica(rank, args, spec, stage_times, host_s, self._note) for rank in range(args.dp_size)]
        for rank in range(args.dp_size):
            self._controller.set_up(rank, spec.max_total_tokens)

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Until all are served."""
        coming = iter(arrivals)
        next_one = next(coming, None)
        busy: list[tuple[float, int]] = []  # a heap: clock and rank of each replica that has something to do
        never = float("inf")
        while next_one is not None or busy or self._news:
            arrival_s = never if next_one is None else next_one.at_s
            news_s = self._news[0][0] if self._news else never
            replica_s = busy[0][0] if busy else never
            if news_s <= min(arrival_s, replica_s):
                self._take_in(*heapq.heappop(self._news)[::2])
            elif next_one is not None and arrival_s <= replica_s:
                rank, was_idle = self._dispatch(next_one)
                if was_idle:
                    heapq.heappush(busy, (self._replicas[rank].clock.now_s, rank))
                next_one = next(coming, None)
            else:
                _, rank = heapq.heappop(busy)
                replica = self._replicas[rank]
                replica.step()
                if not replica.is_idle:
                    heapq.heappush(busy, (replica.clock.now_s, rank))
        self.report.busy_s = sum(replica.runner.busy_s for replica in self._replicas)
        self.report.active_s = sum(replica.runner.active_s for replica in self._replicas)
        return self.report

    def _dispatch(self, arrival: Arrival) -> tuple[int, bool]:
        """The rank, and whether that replica had nothing to do."""
        (ticket,) = self._controller.dispatch(Prompt(arrival.prompt), [arrival.output_len])
        rid = str(next(self._numbers))
        self._live[rid] = _Live(arrival, ticket)
        replica = self._replicas[ticket.replica.rank]
        was_idle = replica.is_idle
        params = SamplingParams(
            max_new_tokens=arrival.output_len, temperature=0.0, ignore_eos=True, stream_interval=_ONLY_FIRST_AND_LAST
        )
        message = TokenizedGenerateReqInput(rid=rid, input_ids=arrival.prompt, sampling_params=params, stream=True)
        replica.send(arrival.at_s + self._path_s / 2, message)
        return ticket.replica.rank, was_idle

    def _note(self, at_s: float, out: BatchTokenIDOut) -> None:
        heapq.heappush(self._news, (at_s, next(self._numbers), out))

    def _take_in(self, at_s: float, out: BatchTokenIDOut) -> None:
        seen_s = at_s + self._path_s / 2
        for i, (rid, count) in enumerate(zip(out.rids, out.completion_tokens.tolist(), strict=True)):
            live = self._live[rid]
            if count and not live.first_s:
                live.first_s = seen_s
                live.ticket.first_token()
            if i in out.finished:
                del self._live[rid]
                self._controller.ended(live.ticket, count)
                self.report.add(live.arrival, live.first_s, seen_s, count, int(out.cached_tokens[i]))
                self._on_served()
