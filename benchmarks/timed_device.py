"""`jaxserve serve` around a device whose steps take a fixed time and cost the host nothing: what is left is the server's work.

    python -m benchmarks.timed_device serve '{"model_path": ..., "port": ...}'     (TIMED_STEP_S=0.004)

The scheduler, the detokenizer and the HTTP server are the real ones. A step begins when it is launched or when the one before
it ends, and ends TIMED_STEP_S later, and for each token of a prompt in it TIMED_TOKEN_S more, for each row that decodes
TIMED_ROW_S, for each pair of a prompt's token and one before it TIMED_PAIR_S; what it samples are ordinary words of the demo
tokenizer. TIMED_POOL_TOKENS is the size of the KV cache.

With `pp_size` the device is a pipeline whose stages take equal parts of a step, each begun when its stage is free and the stage
before is done: `bench simulate`'s, by the clock on the wall.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxserve.bench.deviceless import DevicelessRunner
from jaxserve.bench.simulate import LinearStepTimes, evenly
from jaxserve.bench.simulate.replica import SimulatedRunner, VirtualClock
from jaxserve.bench.simulate.step_times import StageTimes
from jaxserve.config import ServerArgs
from jaxserve.messages import DETOKENIZER, SCHEDULER
from jaxserve.runner import KVGroup, RunnerSpec, StepInput, StepOutput
from jaxserve.server.decoder_handover import wait_for_decoder
from jaxserve.server.launch import launch_server
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.scheduler_process import TailDecoder, open_publisher, serve
from jaxserve.server.worker_process import WorkerContext, run_worker

MAX_ROWS = 256
CONTEXT_LEN = 4096
FIRST_TOKEN, NUM_TOKENS = 300, 1600  # of the demo tokenizer's 2,048: no bytes, no special tokens
_VARIABLES = {
    "step_s": "TIMED_STEP_S", "prefill_token_s": "TIMED_TOKEN_S", "decode_row_s": "TIMED_ROW_S", "pair_s": "TIMED_PAIR_S",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Launched:
    step: StepInput
    ends_s: float


class TimedRunner(DevicelessRunner):
    """The simulated device, to which each launch comes now; only waiting takes real time."""

    def __init__(self, spec: RunnerSpec, stage_times: StageTimes, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(spec)
        self._clock = clock
        self._launched_at = VirtualClock()
        self._device = SimulatedRunner(spec, stage_times, self._launched_at)

    def forward(self, step: StepInput) -> _Launched:
        self._launched_at.now_s = self._clock()
        return _Launched(step, self._device.forward(step).ends_s)

    def fetch(self, handle: _Launched) -> StepOutput:
        left_s = handle.ends_s - self._clock()
        if left_s > 0:
            time.sleep(left_s)
        step = handle.step
        tokens = FIRST_TOKEN + (step.seq_lens * 7 + step.rows * 13) % NUM_TOKENS
        return StepOutput(tokens.astype(np.int32)[:, None], np.ones(step.num_rows, np.int32))

    def internal_state(self) -> dict[str, Any]:
        """Seconds since the start: a stage's in steps, on average, and those in which a step was in any stage."""
        return {"kind": "timed", "busy_s": self._device.busy_s, "active_s": self._device.active_s}


def step_times(environ: Mapping[str, str]) -> LinearStepTimes:
    given = {"TIMED_STEP_S": "0.004", **environ}
    return LinearStepTimes(**{field: float(given.get(name, "0")) for field, name in _VARIABLES.items()})


def environment(times: LinearStepTimes) -> dict[str, str]:
    """From which `step_times` makes them again."""
    return {name: str(getattr(times, field)) for field, name in _VARIABLES.items()}


def timed_spec(args: ServerArgs, times: LinearStepTimes, pool_tokens: int = MAX_ROWS * CONTEXT_LEN) -> RunnerSpec:
    return RunnerSpec(
        page_size=16,
        kv_groups=(KVGroup(pool_tokens // 16),),
        max_rows=MAX_ROWS,
        context_len=CONTEXT_LEN,
        max_step_tokens=8192,
        vocab_size=2048,
        hidden_size=8,
        eos_token_ids=(2046,),
        max_top_logprobs=4,
        num_stages=args.pp_size,
        attention_work_ratio=times.work_ratio,
    )


def work(context: WorkerContext) -> None:
    publisher = open_publisher(context)
    args, times = context.args, step_times(os.environ)
    spec = timed_spec(args, times, int(os.environ.get("TIMED_POOL_TOKENS", MAX_ROWS * CONTEXT_LEN)))
    runner = TimedRunner(spec, evenly(times, args.pp_size))
    decoder = TailDecoder(wait_for_decoder(context))
    serve(context, args, runner, decoder, publisher=publisher)


def main() -> int:
    if sys.argv[1] != "serve":
        return run_worker(SCHEDULER, work)
    args, scheduler = ServerArgs(**json.loads(sys.argv[2])), WorkerCommand.of_module(SCHEDULER, "benchmarks.timed_device")
    commands = (
        *(dataclasses.replace(scheduler, rank=rank) for rank in range(args.dp_size)),
        *(
            WorkerCommand.of_module(DETOKENIZER, "jaxserve.server.detokenizer", rank)
            for rank in range(args.detokenizer_worker_num)
        ),
    )
    return launch_server(args, commands)


if __name__ == "__main__":
    sys.exit(main())
