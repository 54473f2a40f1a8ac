"""InFlight: steps that were launched and whose results nobody has looked at yet, oldest first.

It knows neither queues nor the cache: what a step is made of is decided before, what its results mean is ResultProcessor's.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jaxserve.runner import AdapterLoad, PageUpdates, Runner, StepInput
from jaxserve.scheduler.batch import ScheduleBatch, StepBuilder
from jaxserve.scheduler.constraints import Constraints
from jaxserve.scheduler.meter import Meter
from jaxserve.scheduler.processors import Processors
from jaxserve.scheduler.results import ResultProcessor
from jaxserve.scheduler.stages import Stage


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    batch: ScheduleBatch
    step: StepInput
    handle: Any
    launched_s: float  # time.perf_counter()


class InFlight:
    def __init__(
        self,
        runner: Runner,
        builder: StepBuilder,
        constraints: Constraints,
        processors: Processors | None,
        results: ResultProcessor,
        meter: Meter,
    ) -> None:
        self._runner = runner
        self._builder = builder
        self._constraints = constraints
        self._processors = processors  # None: nobody may bring code
        self._results = results
        self._meter = meter
        self._steps: collections.deque[_Step] = collections.deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, batch: ScheduleBatch, page_updates: PageUpdates, adapter_loads: Sequence[AdapterLoad]) -> StepInput:
        """The forward pass, and the sampling too unless that must wait for `finish_launch`."""
        step = self._builder.build(batch, page_updates, adapter_loads)
        launched_s = time.perf_counter()
        handle = self._runner.forward(step)
        self._steps.append(_Step(batch, step, handle, launched_s))
        if step.needs_masks:
            self._constraints.due = step
        else:
            self._runner.sample(handle)
        return step

    def finish_launch(self) -> None:
        """Samples the step launched last, if it waits for masks, for which `take_in` comes first. Ends requests whose own code
        fails."""
        if (step := self._constraints.due) is not None:
            handle = self._steps[-1].handle
            with self._meter.stages.part("masks"):
                changed = None if self._processors is None else self._processors.apply(step, handle)
                self._runner.sample(handle, self._constraints.masks(step), changed)
            self._constraints.due = None

    def take_in(self, keep: int = 0) -> int:
        """Results of the oldest steps, until `keep` are left and none that the masks of the newest one depend on. Waits for
        them. Returns how many tokens went to requests."""
        num_tokens, stages = 0, self._meter.stages
        while len(self._steps) > keep or self._constraints.wait_for_results:
            launched = self._steps[0]
            stages.enter(Stage.WAIT)
            output = self._runner.fetch(launched.handle)
            stages.enter(Stage.PROCESS)
            self._steps.popleft()
            self._meter.step_done(launched.batch, launched.launched_s)
            num_tokens += self._results.process(launched.batch, launched.step, output)
        return num_tokens
