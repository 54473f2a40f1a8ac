"""`bench scheduler`: what the host does for a decode step, without a device: schedule, prepare the launch, process the result.

A runner that answers at once with a constant token stands in for the device, so all time measured is the scheduler's own: CPU
time of its thread, which neighbours on the machine do not disturb.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from jaxserve.bench.deviceless import DevicelessRunner
from jaxserve.config import ServerArgs
from jaxserve.messages import DetokenizerInput, TokenizedGenerateReqInput, TokenizerInput
from jaxserve.runner import KVGroup, RunnerSpec, StepInput, StepOutput
from jaxserve.scheduler.batch import ScheduleBatch
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import ForwardMode, SamplingParams

_PROMPT_LEN = 64
_CONTEXT_MARGIN = 100
_UNCOUNTED_STEPS = 10


@dataclasses.dataclass(frozen=True)
class HostCost:
    """Medians over the steps, in microseconds of CPU time."""

    num_running: int
    page_size: int
    stream: bool
    schedule_us: float
    launch_us: float
    process_us: float
    total_us: float
    p99_total_us: float
    admit_us: float  # one of the prompts


class ConstantRunner(DevicelessRunner):
    """Every row samples token 1."""

    def forward(self, step: StepInput) -> int:
        return step.num_rows

    def fetch(self, handle: int) -> StepOutput:
        return StepOutput(np.ones((handle, 1), np.int32), np.ones(handle, np.int32))


class _NoSink:
    def send_output(self, message: DetokenizerInput) -> None:
        pass

    def send_reply(self, message: TokenizerInput) -> None:
        pass


def measure(
    num_running: int, num_steps: int, page_size: int, *, stream: bool, on_step: Callable[[], object] = lambda: None
) -> HostCost:
    """Over decode steps with all requests running and one step in flight."""
    scheduler = _busy_scheduler(num_running, num_steps, page_size, stream)
    times: list[tuple[float, float, float]] = []
    admission_s = 0.0
    while len(times) < num_steps + _UNCOUNTED_STEPS:
        began = time.thread_time()
        batch = scheduler.next_batch()
        scheduled = time.thread_time()
        assert isinstance(batch, ScheduleBatch)
        scheduler.launch(batch)
        launched = time.thread_time()
        scheduler.process_results(keep=1)
        scheduler.finish_launch()
        processed = time.thread_time()
        if batch.mode is not ForwardMode.DECODE:
            admission_s += launched - began
        elif len(batch.rows) == num_running:
            times.append((scheduled - began, launched - scheduled, processed - launched))
            on_step()
    counted = np.array(times[_UNCOUNTED_STEPS:]) * 1e6
    schedule, launch, process = np.median(counted, axis=0).tolist()
    totals = counted.sum(axis=1)
    return HostCost(
        num_running,
        page_size,
        stream,
        schedule,
        launch,
        process,
        total_us=float(np.median(totals)),
        p99_total_us=float(np.percentile(totals, 99)),
        admit_us=admission_s / num_running * 1e6,
    )


def _busy_scheduler(num_running: int, num_steps: int, page_size: int, stream: bool) -> Scheduler:
    """With so many requests, which go on for longer than the steps."""
    context_len = _PROMPT_LEN + num_steps + _CONTEXT_MARGIN
    spec = RunnerSpec(
        page_size=page_size,
        kv_groups=(KVGroup(num_running * (context_len + page_size) // page_size + 1),),
        max_rows=num_running,
        context_len=context_len,
        max_step_tokens=16384,
        vocab_size=32000,
        hidden_size=8,
        eos_token_ids=(2,),
        max_top_logprobs=20,
    )
    scheduler = Scheduler(ServerArgs(schedule_conservativeness=0.0), ConstantRunner(spec), decoder=None, sink=_NoSink())
    rng = np.random.default_rng(0)
    for i in range(num_running):
        scheduler.handle(
            TokenizedGenerateReqInput(
                rid=f"request-{i:08d}",
                input_ids=rng.integers(3, 32000, _PROMPT_LEN).astype(np.int32),
                sampling_params=SamplingParams(max_new_tokens=num_steps + _CONTEXT_MARGIN // 2),
                stream=stream,
            )
        )
    return scheduler
