"""The runner alone: `jaxserve.bench.steps` drives it."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cpu_step.cases import DECODE_STEPS, LONGEST, PROMPT_LEN, batch_of, contexts
from jaxserve.bench.steps import StepDriver
from jaxserve.config import ServerArgs
from jaxserve.executor import build_runner

MAX_ROWS = 32
ROW_TOKENS = LONGEST + DECODE_STEPS


class Jaxserve:
    def __init__(self, model_path: str, **options: Any) -> None:
        args = {"max_running_requests": MAX_ROWS, "max_total_tokens": MAX_ROWS * (ROW_TOKENS + 32) + PROMPT_LEN, **options}
        built = build_runner(ServerArgs(model_path=model_path, **args), show_progress=False)
        self.driver = StepDriver(built.runner)

    def seconds(self, case: str) -> float:
        """Of a prompt, or of one decode step."""
        batch = batch_of(case)
        if batch is None:
            self.driver.enter(1, PROMPT_LEN)
            return self.driver.prefill([PROMPT_LEN])
        self.driver.enter(batch, ROW_TOKENS)
        return statistics.mean(self.driver.decode(contexts(batch), DECODE_STEPS)[1:])
