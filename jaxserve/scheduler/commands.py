"""RunnerCommands: commands to the runner on behalf of control requests, one at a time, and what they mean for requests.

No step is launched while a command is carried out, nor while memory is released. Weights change only when no request holds
pages: so nobody's tokens come from two sets of weights, unless generation was paused for just that. All methods that wait are
generators, like the handlers of control requests that call them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from jaxserve.commands import (
    MEMORY_TAGS,
    Command,
    CommandError,
    ForgetTensors,
    MemoryTag,
    ReleaseMemory,
    ReplaceTensors,
    ReplaceWeights,
    ResumeMemory,
    WeightsLost,
)
from jaxserve.runner import Runner
from jaxserve.scheduler.pace import Pace
from jaxserve.scheduler.requests import Requests
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from jaxserve.scheduler.control.update_weights_from_tensor import OpenUpdate

RELEASED_MESSAGE = "The server's memory is released ({tags}); /resume_memory_occupation takes it again."

Waiting = Generator[None, None, None]


class RunnerCommands:
    def __init__(
        self,
        runner: Runner,
        pace: Pace,
        requests: Requests,
        waiting: WaitingQueue,
        residents: Residents,
        flush_cache: Callable[[], bool],
        num_in_flight: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """`wake`: see Scheduler."""
        self._runner = runner
        self._pace = pace
        self._requests = requests
        self._waiting = waiting
        self._residents = residents
        self._num_in_flight = num_in_flight
        self._flush_cache = flush_cache
        self._wake = wake
        self._under_way = ""  # the control request that is served
        self._released: set[MemoryTag] = set()
        self.open_update: OpenUpdate | None = None  # for which tensors are taken in

    @property
    def released(self) -> tuple[MemoryTag, ...]:
        return tuple(tag for tag in MEMORY_TAGS if tag in self._released)

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """Around a control request's use of this. CommandError if another one is not done."""
        if self._under_way:
            raise CommandError(f"{name} must wait: {self._under_way} is still under way.")
        self._under_way = name
        try:
            yield
        finally:
            self._under_way = ""
            self._waiting.only_begun = False

    @contextlib.contextmanager
    def forgetting(self, command: ReplaceWeights | ReplaceTensors) -> Iterator[None]:
        """Around what leads to the command: whether it comes to that or not, of tensors that were read for it nothing is
        kept."""
        try:
            yield
        finally:
            if isinstance(command, ReplaceTensors) and command.handover is None:
                self.forget_tensors()

    def forget_tensors(self) -> None:
        """Those that were read, with the update that was to bring them."""
        self._runner.execute(ForgetTensors())  # comes before whatever is asked next; nobody need wait for it
        self.open_update = None

    def beside_steps(self, command: Command) -> Waiting:
        """Raises CommandError."""
        future = self._runner.execute(command)
        future.add_done_callback(lambda _: self._wake())
        while not future.done():
            yield
        future.result()

    def between_steps(self, command: Command) -> Waiting:
        """Between two steps of whatever runs: the caller has taken in the results of all launched ones. Raises CommandError."""
        yield from self._alone(command)

    def replace_weights(self, command: ReplaceWeights | ReplaceTensors, *, keeps_cache: bool = False) -> Waiting:
        """Lets the requests that have begun end, while no others begin. If generation is paused, those that wait or were
        retracted go on with the new weights later. `keeps_cache`: nobody ends, and all that was computed with the old weights
        stays, of running requests and of others. Raises CommandError."""
        if keeps_cache:
            yield from self._replace(command)
            return
        self._waiting.only_begun = True
        while not self._is_unused:
            if self._pace.is_paused and len(self._residents):
                raise CommandError(
                    f"{len(self._residents)} requests are paused in place and would go on with a KV cache of the old weights. "
                    "Pause with mode retract or abort first."
                )
            yield
        yield from self._replace(command)
        self._flush()

    def _replace(self, command: ReplaceWeights | ReplaceTensors) -> Waiting:
        try:
            yield from self._alone(command)
        except WeightsLost:
            self._released.add("weights")
            raise
        else:
            self._released.discard("weights")
        finally:
            self._hold()

    def release(self, tags: tuple[MemoryTag, ...]) -> Waiting:
        """Requests that come from now on are refused. Raises CommandError, also if something runs."""
        if not self._is_unused or (len(self._waiting) and not self._pace.is_paused):
            raise CommandError(
                f"Memory can be released only while nothing runs: {len(self._residents)} requests are running and "
                f"{len(self._waiting)} are waiting. Let them end, abort them, or pause with mode retract."
            )
        self._requests.unavailable = RELEASED_MESSAGE.format(tags=", ".join(tags))
        yield from self._alone(ReleaseMemory(tags))
        if "kv_cache" in tags:
            self._flush()
        self._released.update(tags)
        self._hold()

    def resume(self, tags: tuple[MemoryTag, ...]) -> Waiting:
        """Raises CommandError, at once for what is not released: then steps may be in flight, which no command may meet."""
        for tag in tags:
            if tag not in self._released:
                raise CommandError(f"{tag} is not released.")
        yield from self._alone(ResumeMemory(tags))
        self._released.difference_update(tags)
        self._hold()

    @property
    def _is_unused(self) -> bool:
        """Nobody holds pages, and nobody who has begun waits for some, unless generation is paused."""
        is_awaited = self._waiting.has_begun_ones and not self._pace.is_paused
        return not self._num_in_flight() and not len(self._residents) and not is_awaited

    def _alone(self, command: Command) -> Waiting:
        assert not self._num_in_flight(), "a command stands between steps"
        self._pace.is_held = True
        try:
            yield from self.beside_steps(command)
        finally:
            self._hold()

    def _hold(self) -> None:
        """What follows from what is released."""
        self._pace.is_held = bool(self._released)
        self._requests.unavailable = RELEASED_MESSAGE.format(tags=", ".join(self.released)) if self._released else ""

    def _flush(self) -> None:
        flushed = self._flush_cache()
        assert flushed, "a request holds pages"
