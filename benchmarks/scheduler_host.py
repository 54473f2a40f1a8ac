"""Host cost of one decode step, without a device: schedule, prepare the launch, process the result.

    python benchmarks/scheduler_host.py [--running 256] [--steps 2000]

A runner that answers at once with a constant token stands in for the device, so all time measured is the scheduler's own: CPU
time of its thread, which neighbours on the machine do not disturb. Prints microseconds per step (median, and the 99th
percentile of the total) for page sizes 1 and 16, streaming and not, and what admitting one of the prompts costs.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.messages import DetokenizerInput, TokenizedGenerateReqInput, TokenizerInput
from jaxserve.runner import Command, CommandError, KVGroup, LogitLines, RunnerSpec, StepInput, StepOutput
from jaxserve.scheduler.batch import ScheduleBatch
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import ForwardMode, SamplingParams

PROMPT_LEN = 64


class ConstantRunner:
    """Every row samples token 1."""

    def __init__(self, spec: RunnerSpec) -> None:
        self.spec = spec

    def forward(self, step: StepInput) -> int:
        return step.num_rows

    def read_logits(self, handle: int, lines: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def sample(self, handle: int, masks: np.ndarray | None = None, changed: LogitLines | None = None) -> None:
        pass

    def fetch(self, handle: int) -> StepOutput:
        return StepOutput(np.ones((handle, 1), np.int32), np.ones(handle, np.int32))

    def execute(self, command: Command) -> Future[None]:
        raise CommandError("This runner has neither weights nor memory.")

    def tend(self) -> int:
        return 0

    def internal_state(self) -> dict[str, Any]:
        return {}


class CountingSink:
    def __init__(self) -> None:
        self.num_tokens = 0

    def send_output(self, message: DetokenizerInput) -> None:
        self.num_tokens += len(getattr(message, "token_ids", ()))

    def send_reply(self, message: TokenizerInput) -> None:
        pass


def measure(num_running: int, num_steps: int, page_size: int, stream: bool) -> dict[str, float]:
    """Median microseconds of each part, over decode steps with all requests running and one step in flight."""
    context_len = PROMPT_LEN + num_steps + 100
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
    runner, sink = ConstantRunner(spec), CountingSink()
    scheduler = Scheduler(ServerArgs(schedule_conservativeness=0.0), runner, decoder=None, sink=sink)
    rng = np.random.default_rng(0)
    for i in range(num_running):
        scheduler.handle(
            TokenizedGenerateReqInput(
                rid=f"request-{i:08d}",
                input_ids=rng.integers(3, 32000, PROMPT_LEN).astype(np.int32),
                sampling_params=SamplingParams(max_new_tokens=num_steps + 50),
                stream=stream,
            )
        )
    times: dict[str, list[float]] = {"schedule": [], "launch": [], "process": []}
    admission_s = 0.0
    while len(times["process"]) < num_steps:
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
            times["schedule"].append(scheduled - began)
            times["launch"].append(launched - scheduled)
            times["process"].append(processed - launched)
    result = {name: float(np.median(values[10:])) * 1e6 for name, values in times.items()}
    totals = np.sum([values[10:] for values in times.values()], axis=0) * 1e6
    result |= {"total": float(np.median(totals)), "p99": float(np.percentile(totals, 99))}
    return result | {"admit": admission_s / num_running * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps to measure")
    args = parser.parse_args()
    print(f"{args.running} running requests, microseconds per decode step")
    print(f"{'page_size':>9} {'stream':>6} {'schedule':>9} {'launch':>9} {'process':>9} {'total':>9} {'p99':>9} {'admit 1':>9}")
    for page_size in (1, 16):
        for stream in (True, False):
            r = measure(args.running, args.steps, page_size, stream)
            print(
                f"{page_size:>9} {stream!s:>6} {r['schedule']:>9.0f} {r['launch']:>9.0f} {r['process']:>9.0f} "
                f"{r['total']:>9.0f} {r['p99']:>9.0f} {r['admit']:>9.0f}"
            )


if __name__ == "__main__":
    main()
