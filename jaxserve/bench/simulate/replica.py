"""SimulatedReplica: the scheduler's own loop around a device that only takes time, on a clock of its own."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.bench.deviceless import DevicelessRunner
from jaxserve.bench.simulate.step_times import StageTimes
from jaxserve.config import ServerArgs
from jaxserve.messages import SCHEDULER, BatchTokenIDOut, DetokenizerInput, Message, TokenizerInput, WorkerAddress
from jaxserve.runner import RunnerSpec, StepInput, StepOutput
from jaxserve.scheduler.loop import SchedulerLoop
from jaxserve.scheduler.scheduler import Scheduler

SAMPLED_TOKEN = 1
_POLL_S = 1e-3


@dataclasses.dataclass
class VirtualClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass(frozen=True)
class _Launched:
    num_rows: int
    ends_s: float


class SimulatedRunner(DevicelessRunner):
    """A stage begins a step when it has ended the one before and got what the stage before it hands on; the first one, when the
    step was launched and the tokens that rows go on from were sampled. Waiting for a step moves the clock."""

    def __init__(self, spec: RunnerSpec, stage_times: StageTimes, clock: VirtualClock) -> None:
        super().__init__(spec)
        self.busy_s = 0.0  # of a stage, on average
        self.active_s = 0.0  # in which a step was in some stage
        self._stage_times = stage_times
        self._clock = clock
        self._free_s: dict[int, float] = {}  # of each stage
        self._sampled_s = np.zeros(spec.max_rows)  # the newest token of each row
        self._active_until_s = 0.0

    def forward(self, step: StepInput) -> _Launched:
        took_s, tokens_s = self._stage_times(step), self._sampled_s[step.rows[: step.num_decode_rows]]
        ready_s = max(self._clock.now_s, float(tokens_s.max(initial=0.0)))
        begins_s = max(ready_s, self._free_s.get(0, 0.0))
        for stage, seconds in enumerate(took_s):
            ready_s = self._free_s[stage] = max(ready_s, self._free_s.get(stage, 0.0)) + seconds
        self._sampled_s[step.rows] = ready_s
        self.busy_s += sum(took_s) / len(took_s)
        self.active_s += ready_s - max(begins_s, self._active_until_s)
        self._active_until_s = ready_s
        return _Launched(step.num_rows, ready_s)

    def fetch(self, handle: _Launched) -> StepOutput:
        self._clock.now_s = max(self._clock.now_s, handle.ends_s)
        return StepOutput(np.full((handle.num_rows, 1), SAMPLED_TOKEN, np.int32), np.ones(handle.num_rows, np.int32))


class SimulatedReplica:
    def __init__(
        self,
        rank: int,
        args: ServerArgs,
        spec: RunnerSpec,
        stage_times: StageTimes,
        host_s: float,
        tell: Callable[[float, BatchTokenIDOut], None],
    ) -> None:
        """`host_s`: what a round of the loop takes the host. `tell`: when which outputs left."""
        self.clock = VirtualClock()
        self.runner = SimulatedRunner(spec, stage_times, self.clock)
        self._host_s = host_s
        self._tell = tell
        self._inbox: collections.deque[tuple[float, Message]] = collections.deque()
        address = WorkerAddress(SCHEDULER, rank)
        self.scheduler = Scheduler(
            args, self.runner, decoder=None, sink=self, clock=self.clock, wall_clock=self.clock, address=address
        )
        self._loop = SchedulerLoop(self.scheduler, self, overlap=not args.disable_overlap_schedule)

    @property
    def is_idle(self) -> bool:
        """Nothing to do until somebody sends something."""
        return self.scheduler.is_idle and not self._inbox

    def send(self, at_s: float, message: Message) -> None:
        """In the order of time."""
        if self.is_idle:
            self.clock.now_s = max(self.clock.now_s, at_s)
        self._inbox.append((at_s, message))

    def step(self) -> None:
        """A round of the loop; the clock may go on to the end of a step of the device."""
        began_s = self.clock.now_s
        self.clock.now_s += self._host_s
        self._loop.step()
        if self.clock.now_s == began_s and not self.scheduler.num_in_flight:
            self.clock.now_s += _POLL_S  # it waits for a time to come

    # --- as the loop's transport

    def recv_messages(self, timeout_s: float | None) -> Sequence[Message]:
        messages = []
        while self._inbox and self._inbox[0][0] <= self.clock.now_s:
            messages.append(self._inbox.popleft()[1])
        return messages

    def send_output(self, message: DetokenizerInput) -> None:
        if isinstance(message, BatchTokenIDOut):
            self._tell(self.clock.now_s, message)

    def send_reply(self, message: TokenizerInput) -> None:
        pass
