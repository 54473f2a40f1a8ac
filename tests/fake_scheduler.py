"""A scheduler process without a model: the real loop, scheduler and sockets around a FakeRunner.

Started as a script by tests, with the arguments every worker gets. FAKE_SCHEDULER says how to misbehave: `user_error`, `crash`,
`exit` and `hang` before it is ready; `hang_step` and `exit_step` in the first steps after the warm-up. FAKE_STEP_S is the time
a step takes, FAKE_SPEC a RunnerSpec's fields as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from fake_runner import FakeRunner, fake_spec
from fake_vectors import fake_vectors

from jaxserve.messages import DETOKENIZER, SCHEDULER
from jaxserve.server.decoder_handover import wait_for_decoder
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.scheduler_process import TailDecoder, open_publisher, serve
from jaxserve.server.worker_process import UserError, WorkerContext, run_worker

VOCAB_SIZE = 2048  # of the demo tokenizer
CONTEXT_LEN = 512
EOS = 2046  # a special token, far from what tests look at


def commands(num_replicas: int = 1, num_detokenizers: int = 1) -> tuple[WorkerCommand, ...]:
    """So many of this scheduler, and of the real detokenizer."""
    argv = (sys.executable, str(Path(__file__).resolve()))
    return (
        *(WorkerCommand(SCHEDULER, argv, rank) for rank in range(num_replicas)),
        *(WorkerCommand.of_module(DETOKENIZER, "jaxserve.server.detokenizer", rank) for rank in range(num_detokenizers)),
    )


class _HangingRunner(FakeRunner):
    def fetch(self, handle: Any) -> Any:
        if len(self.steps) > 2:
            threading.Event().wait()
        return super().fetch(handle)


class _LateRunner(FakeRunner):
    """Hangs for some seconds, as a test's process cannot end its threads."""

    def fetch(self, handle: Any) -> Any:
        if len(self.steps) > 2:
            time.sleep(4.0)
        return super().fetch(handle)


class _DyingRunner(FakeRunner):
    def fetch(self, handle: Any) -> Any:
        if len(self.steps) > 8:
            print("what others asked for", file=sys.stderr, flush=True)
            os._exit(3)
        return super().fetch(handle)


def work(context: WorkerContext) -> None:
    kind = os.environ.get("FAKE_SCHEDULER", "")
    if kind == "user_error":
        raise UserError("--model-path 'nowhere' does not exist.")
    if kind == "crash":
        raise RuntimeError("the device is on fire")
    if kind == "exit":
        print("last line before the end", file=sys.stderr, flush=True)
        os._exit(3)
    if kind == "hang":
        time.sleep(600)
    publisher = open_publisher(context)
    spec = fake_spec(
        vocab_size=VOCAB_SIZE, context_len=CONTEXT_LEN, num_pages=1 << 15, max_rows=256, max_step_tokens=4096,
        eos_token_ids=(EOS,), **_changes(),
    )  # fmt: skip
    make = {"hang_step": _HangingRunner, "hang_in_step": _LateRunner, "exit_step": _DyingRunner}.get(kind, FakeRunner)
    runner = make(spec, step_delay_s=float(os.environ.get("FAKE_STEP_S", "0")))
    decoder = TailDecoder(wait_for_decoder(context))
    serve(context, context.args, runner, decoder, publisher=publisher)
    runner.close()


def _changes() -> dict[str, Any]:
    """FAKE_SPEC: what the model is, in place of the defaults; of its vectors, too."""
    changes: dict[str, Any] = json.loads(os.environ.get("FAKE_SPEC", "{}"))
    if "vectors" in changes:
        changes["vectors"] = fake_vectors(**changes["vectors"])
    return changes


if __name__ == "__main__":
    sys.exit(run_worker(SCHEDULER, work))
