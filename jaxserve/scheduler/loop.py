"""The scheduler's loop: receive, schedule, launch, process results.

Overlap (default): while the device runs step N, the host takes in the results of step N-1 and prepares N+1. Launching N never
waits for N-1, because decode rows read their input token on the device. Only where the plan itself depends on the results
(somebody has to give way, and who has just ended?) they are taken in first.
Plain (--disable-overlap-schedule): each step's result is processed before the next step is scheduled. Same tokens.
A pipeline of P stages computes P steps at a time: then it is the result of N-P that is taken in once N was launched, or, plain,
before N is scheduled.

The loop knows a Transport, not sockets; it ends when a ShutdownReq came and all requests are answered.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from jaxserve.cache import KVCacheEvent
from jaxserve.messages import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    DetokenizerInput,
    Message,
    ShutdownReq,
    TokenizedGenerateReqInput,
    TokenizerInput,
)
from jaxserve.scheduler.batch import NeedsResults
from jaxserve.scheduler.recv_skipper import RecvSkipper
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.stages import Stage
from jaxserve.scheduler.watchdog import Watchdog

# How long nothing must have arrived before idle-time work (leak check) is done: it should not delay the next request.
IDLE_CHECK_DELAY_S = 0.1
# Sequences taken in or aborted between two steps, each about 15 us; what arrived beyond them waits for the next round, so that
# a large batch does not keep the running requests from their tokens.
SEQUENCES_PER_ROUND = 256


class Transport(Protocol):
    def recv_messages(self, timeout_s: float | None) -> Sequence[Message]:
        """Messages that are there, the first of them if they are many. If there are none, waits for one: not at all (0), so
        long, or until it comes (None)."""
        ...

    def send_output(self, message: DetokenizerInput) -> None: ...

    def send_reply(self, message: TokenizerInput) -> None: ...


class SchedulerLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        transport: Transport,
        *,
        overlap: bool = True,
        sleep_on_idle: bool = True,
        recv_interval: int = 1,
        watchdog: Watchdog | None = None,
        publish_events: Callable[[Sequence[KVCacheEvent]], None] | None = None,
    ) -> None:
        """`publish_events` is given the KV cache events of each round, and never waits."""
        self._scheduler = scheduler
        self._stages = scheduler.stages
        self._transport = transport
        self._overlap = overlap
        self._sleep_on_idle = sleep_on_idle
        self._watchdog = watchdog
        self._publish_events = publish_events
        self._recv_skipper = RecvSkipper(recv_interval)
        self._arrived: collections.deque[Message] = collections.deque()  # and not handled yet
        self._was_idle_long = False  # idle-time work is done

    def run(self) -> None:
        """Until shutdown; then tells the detokenizer that nothing follows."""
        while not self._scheduler.is_drained:
            self.step()
        self._scheduler.profiler.finish()
        self._transport.send_output(ShutdownReq())

    def step(self) -> None:
        """One round. Blocks only for messages when there is nothing to do, and for the result of a step."""
        was_idle, timeout_s = self._scheduler.is_idle, self._recv_timeout_s()
        self._stages.enter(Stage.RECEIVE if timeout_s == 0 else Stage.IDLE)
        if was_idle or timeout_s != 0 or self._arrived or self._recv_skipper.is_due:
            self._arrived.extend(self._transport.recv_messages(timeout_s))
            self._recv_skipper.received()
        self._stages.enter(Stage.RECEIVE)
        was_quiet = was_idle and not self._arrived
        with self._watchdog.working() if self._watchdog is not None else contextlib.nullcontext():
            for message in self._next_messages():
                self._scheduler.handle(message)
            self._work(was_quiet)

    def _next_messages(self) -> Iterator[Message]:
        """Those for this round, in the order they came."""
        room = SEQUENCES_PER_ROUND
        while self._arrived and room > 0:
            message = self._arrived.popleft()
            room -= _num_sequences(message)
            yield message

    def _work(self, was_quiet: bool) -> None:
        """`was_quiet`: nothing was to be done before, and nothing arrived."""
        scheduler = self._scheduler
        scheduler.check_timers()
        self._stages.enter(Stage.SCHEDULE)
        batch = scheduler.next_batch()
        while isinstance(batch, NeedsResults):
            assert scheduler.num_in_flight, "all results are in"
            scheduler.process_results(keep=scheduler.num_in_flight - 1)
            self._stages.enter(Stage.SCHEDULE)
            batch = scheduler.next_batch()
        if batch is not None:
            self._stages.enter(Stage.LAUNCH)
            scheduler.launch(batch)
        self._stages.enter(Stage.PROCESS)
        # Without a new step the oldest result may bring one about.
        scheduler.process_results(keep=scheduler.num_stages if batch is not None else max(scheduler.num_in_flight - 1, 0))
        self._stages.enter(Stage.LAUNCH)
        scheduler.finish_launch()
        if not self._overlap:
            scheduler.process_results(keep=scheduler.num_stages - 1)
        self._recv_skipper.round_ended(batch)
        if not scheduler.is_idle:
            self._was_idle_long = False
        elif was_quiet and not self._was_idle_long:
            scheduler.on_idle()
            self._was_idle_long = True
        if self._publish_events is not None:
            self._publish_events(scheduler.cache.take_events())

    def _recv_timeout_s(self) -> float | None:
        wait_s = self._scheduler.wait_s if self._sleep_on_idle and not self._arrived else 0.0
        if wait_s is None and not self._was_idle_long:
            return IDLE_CHECK_DELAY_S
        return wait_s


def _num_sequences(message: Message) -> int:
    """That a message brings or ends."""
    if isinstance(message, BatchTokenizedGenerateReqInput):
        return sum(map(_num_sequences, message.batch))
    if isinstance(message, TokenizedGenerateReqInput):
        return 1 + len(message.more_samples)
    return len(message.rids) if isinstance(message, AbortReq) else 0
