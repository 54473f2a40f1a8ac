"""The runner, driven as the scheduler drives it: the next step is launched before the last one is fetched."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.cpu_step.cases import DECODE_STEPS, LONGEST, PROMPT_LEN, batch_of, contexts
from jaxserve.config import ServerArgs
from jaxserve.executor import build_runner
from jaxserve.runner import PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

MAX_ROWS = 32
ROW_TOKENS = LONGEST + DECODE_STEPS
_NOTHING = np.zeros(0, np.int32)


class Jaxserve:
    """Rows keep their pages; what stands in them does not matter to the time a step takes."""

    def __init__(self, model_path: str, **options: Any) -> None:
        args = {"max_running_requests": MAX_ROWS, "max_total_tokens": MAX_ROWS * (ROW_TOKENS + 32) + PROMPT_LEN, **options}
        built = build_runner(ServerArgs(model_path=model_path, **args), show_progress=False)
        self.runner, self.chunk = built.runner, built.runner.spec.max_step_tokens
        self._pages_per_row = self._pages(ROW_TOKENS)
        self._enter_rows()

    def seconds(self, case: str) -> float:
        """Of a prompt, or of one decode step."""
        batch = batch_of(case)
        return self._prefill() if batch is None else self._decode(batch)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.runner.spec.page_size)

    def _enter_rows(self) -> None:
        """Gives row r its pages by a step of one token."""
        count = self._pages_per_row
        for row in range(MAX_ROWS):
            pages = np.arange(count, dtype=np.int32) + row * count
            self._run([row], [1], [1], PageUpdates.of(np.full(count, row, np.int32), np.arange(count, dtype=np.int32), pages))

    def _prefill(self) -> float:
        """Of row 0, into pages behind those of the rows."""
        count = self._pages(PROMPT_LEN)
        pages = np.arange(count, dtype=np.int32) + MAX_ROWS * self._pages_per_row
        updates = PageUpdates.of(np.zeros(count, np.int32), np.arange(count, dtype=np.int32), pages)
        started_s = time.perf_counter()
        for end in range(self.chunk, PROMPT_LEN + self.chunk, self.chunk):
            start = end - self.chunk
            end = min(end, PROMPT_LEN)
            handle = self._launch([0], [end], [end - start], updates if start == 0 else None)
        self.runner.fetch(handle)
        took_s = time.perf_counter() - started_s
        own = np.arange(self._pages_per_row, dtype=np.int32)
        self._run([0], [1], [1], PageUpdates.of(np.zeros_like(own), own, own))
        return took_s

    def _decode(self, batch: int) -> float:
        rows, lengths = list(range(batch)), np.asarray(contexts(batch))
        self.runner.fetch(self._launch_decode(rows, lengths + 1))
        started_s, last = time.perf_counter(), None
        for step in range(1, DECODE_STEPS):
            handle = self._launch_decode(rows, lengths + 1 + step)
            if last is not None:
                self.runner.fetch(last)
            last = handle
        self.runner.fetch(last)
        return (time.perf_counter() - started_s) / (DECODE_STEPS - 1)

    def _launch_decode(self, rows: list[int], lengths: np.ndarray) -> Any:
        return self._launch(rows, lengths, [1] * len(rows), decode=True)

    def _run(self, rows: Any, lengths: Any, extends: Any, updates: PageUpdates | None = None) -> None:
        self.runner.fetch(self._launch(rows, lengths, extends, updates))

    def _launch(
        self, rows: Any, lengths: Any, extends: Any, updates: PageUpdates | None = None, *, decode: bool = False
    ) -> Any:
        ids = _NOTHING if decode else np.arange(10, 10 + sum(extends), dtype=np.int32) % 2000
        step = StepInput(
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            rows=np.asarray(rows, np.int32),
            seq_lens=np.asarray(lengths, np.int32),
            extend_lens=np.asarray(extends, np.int32),
            num_decode_rows=len(rows) if decode else 0,
            input_ids=ids,
            sample=np.ones(len(rows), bool),
            page_updates=updates or PageUpdates.of(_NOTHING, _NOTHING, _NOTHING),
            new_rows=[] if decode else [_greedy(row) for row in rows],
            needs_sampling=False,
            needs_adjusting=False,
            needs_logprobs=False,
            needs_top_logprobs=False,
        )
        return launch(self.runner, step)


def _greedy(row: int) -> RowState:
    params = SamplingParams(temperature=0)
    return RowState(row, params, seed=0, prompt_len=1, stop_token_ids=_NOTHING, output_ids=_NOTHING, token_ids=_NOTHING)
