"""`jaxserve serve` around a device whose steps take a fixed time and cost the host nothing: what is left is the server's work.

    python -m benchmarks.timed_device serve '{"model_path": ..., "port": ...}'     (TIMED_STEP_S=0.004)

The scheduler, the detokenizer and the HTTP server are the real ones. A step begins when it is launched or when the one before
it ends, and ends TIMED_STEP_S later, and for each token of a prompt in it TIMED_TOKEN_S more; what it samples are ordinary
words of the demo tokenizer. TIMED_POOL_TOKENS is the size of the KV cache.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import numpy as np

from jaxserve.bench.deviceless import DevicelessRunner
from jaxserve.config import ServerArgs
from jaxserve.messages import DETOKENIZER, SCHEDULER
from jaxserve.runner import KVGroup, RunnerSpec, StepInput, StepOutput
from jaxserve.server.decoder_handover import wait_for_decoder
from jaxserve.server.launch import launch_server
from jaxserve.server.scheduler_process import TailDecoder, open_publisher, serve
from jaxserve.server.worker_process import WorkerContext, run_worker
from jaxserve.server.workers import WorkerCommand

MAX_ROWS = 256
CONTEXT_LEN = 4096
_FIRST_TOKEN, _NUM_TOKENS = 300, 1600  # of the demo tokenizer's 2,048: no bytes, no special tokens


@dataclasses.dataclass(frozen=True)
class _Launched:
    step: StepInput
    ends_s: float


class TimedRunner(DevicelessRunner):
    def __init__(self, spec: RunnerSpec, step_s: float, token_s: float = 0.0) -> None:
        super().__init__(spec)
        self._step_s = step_s
        self._token_s = token_s
        self._free_s = 0.0  # when the device will have ended what was launched

    def forward(self, step: StepInput) -> _Launched:
        self._free_s = max(self._free_s, time.monotonic()) + self._step_s + len(step.input_ids) * self._token_s
        return _Launched(step, self._free_s)

    def fetch(self, handle: _Launched) -> StepOutput:
        left_s = handle.ends_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        step = handle.step
        tokens = _FIRST_TOKEN + (step.seq_lens * 7 + step.rows * 13) % _NUM_TOKENS
        return StepOutput(tokens.astype(np.int32)[:, None], np.ones(step.num_rows, np.int32))

    def internal_state(self) -> dict[str, Any]:
        return {"kind": "timed"}


def work(context: WorkerContext) -> None:
    publisher = open_publisher(context)
    spec = RunnerSpec(
        page_size=16,
        kv_groups=(KVGroup(int(os.environ.get("TIMED_POOL_TOKENS", MAX_ROWS * CONTEXT_LEN)) // 16),),
        max_rows=MAX_ROWS,
        context_len=CONTEXT_LEN,
        max_step_tokens=8192,
        vocab_size=2048,
        hidden_size=8,
        eos_token_ids=(2046,),
        max_top_logprobs=4,
    )
    runner = TimedRunner(spec, float(os.environ.get("TIMED_STEP_S", "0.004")), float(os.environ.get("TIMED_TOKEN_S", "0")))
    decoder = TailDecoder(wait_for_decoder(context.paths.folder, context.args))
    serve(context, context.args, runner, decoder, publisher=publisher)


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
