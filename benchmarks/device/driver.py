"""A ModelRunner and the steps it is given: rows of one length, each with its own pages. No scheduler, no server."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_configs import write_config

# Programs of one machine's drivers and servers: what one compiled the next one finds.
COMPILED = str(Path(tempfile.gettempdir()) / "device-benchmark-compiled")
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A runner: its model, pages, and the few buckets that it compiles."""

    model: str  # a folder with a checkpoint, or a name for what is in `config`
    backend: str
    page_size: int
    batches: tuple[int, ...]  # decode buckets
    context: int
    prefill_tokens: int  # of a step
    decode_steps: int
    repeats: int = 1
    kv_cache_dtype: str = "auto"
    config: tuple[tuple[str, Any], ...] = ()  # items of a config.json; weights are random then
    compiled: str = COMPILED

    @property
    def max_rows(self) -> int:
        return max(self.batches)

    @property
    def row_tokens(self) -> int:
        """Room in a row's pages: its context and what the timed steps add, in whole pages."""
        wanted = self.context + self.decode_steps + 1
        return -(-wanted // self.page_size) * self.page_size

    @property
    def pages_per_row(self) -> int:
        return self.row_tokens // self.page_size

    @property
    def together(self) -> int:
        """Prompts of a prefill step."""
        return max(min(self.prefill_tokens // self.context, self.max_rows), 1)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What the rows of a step ask for."""

    params: dict[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": 0})
    needs_sampling: bool = False
    needs_adjusting: bool = False
    needs_logprobs: bool = False
    needs_top_logprobs: bool = False

    def flags(self) -> dict[str, bool]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "params"}


def server_args(plan: Plan) -> Any:
    """ServerArgs of the plan's runner; writes the model's config.json where there is none."""
    from jaxserve.config import ServerArgs

    folder = write_config(Path(tempfile.mkdtemp()), dict(plan.config)) if plan.config else Path(plan.model)
    return ServerArgs(
        model_path=str(folder),
        load_format="dummy" if plan.config else "auto",
        attention_backend=plan.backend,
        kv_cache_dtype=plan.kv_cache_dtype,
        page_size=plan.page_size,
        context_length=plan.row_tokens,
        max_running_requests=plan.max_rows,
        max_total_tokens=plan.max_rows * plan.row_tokens,
        chunked_prefill_size=plan.prefill_tokens,
        max_prefill_tokens=plan.prefill_tokens,
        prefill_token_buckets=(plan.prefill_tokens,),
        decode_row_buckets=plan.batches,
        compilation_cache_dir=plan.compiled,
    )


class Driver:
    def __init__(self, plan: Plan) -> None:
        from jaxserve.executor import build_runner

        self.plan = plan
        args = server_args(plan)
        started_s = time.monotonic()
        self.runner = build_runner(args, show_progress=False).runner
        assert len(self.runner.spec.kv_groups) == 1, "rows keep all their pages here: layers must not differ in their windows"
        self.start_s = round(time.monotonic() - started_s, 1)
        self._filled = 0

    def prefill(self, prompts: Sequence[np.ndarray], first_row: int = 0, sampling: Sampling | None = None) -> Any:
        """Launches one step with the whole prompts of as many rows."""
        from jaxserve.types import ForwardMode

        lens = [len(prompt) for prompt in prompts]
        rows = range(first_row, first_row + len(prompts))
        return self._launch(ForwardMode.EXTEND, rows, lens, lens, np.concatenate(prompts), sampling or Sampling(), new=rows)

    def decode(self, batch: int, seq_len: int, sampling: Sampling, *, brings_params: bool) -> Any:
        """Launches one step that brings the first `batch` rows to `seq_len` tokens. What they ask for stays with the rows, so
        only the first of several steps need bring it."""
        from jaxserve.types import ForwardMode

        rows = range(batch)
        new = rows if brings_params else ()
        return self._launch(ForwardMode.DECODE, rows, [seq_len] * batch, [1] * batch, _NOTHING, sampling, new, batch)

    def mixed(self, batch: int, seq_len: int, prompt: np.ndarray) -> Any:
        """Launches one step of `batch` decode rows and a prompt in the row behind them."""
        from jaxserve.types import ForwardMode

        rows = range(batch + 1)
        lens = [seq_len] * batch + [len(prompt)]
        return self._launch(ForwardMode.MIXED, rows, lens, [1] * batch + [len(prompt)], prompt, Sampling(), rows[batch:], batch)

    def _launch(
        self,
        mode: Any,
        rows: Sequence[int],
        seq_lens: Sequence[int],
        extend_lens: Sequence[int],
        input_ids: np.ndarray,
        sampling: Sampling,
        new: Sequence[int],
        num_decode_rows: int = 0,
    ) -> Any:
        """Rows in `new` bring their sampling, and their pages if they are extended."""
        from jaxserve.runner import PageUpdates, RowState, StepInput, launch
        from jaxserve.types import SamplingParams

        pages = self.plan.pages_per_row
        placed = np.asarray([row for row, length in zip(rows, extend_lens, strict=True) if row in new and length > 1], np.int32)
        index, owner = np.tile(np.arange(pages, dtype=np.int32), len(placed)), np.repeat(placed, pages)
        params = SamplingParams(**sampling.params)
        step = StepInput(
            mode=mode,
            rows=np.asarray(rows, np.int32),
            seq_lens=np.asarray(seq_lens, np.int32),
            extend_lens=np.asarray(extend_lens, np.int32),
            num_decode_rows=num_decode_rows,
            input_ids=np.asarray(input_ids, np.int32),
            sample=np.ones(len(rows), bool),
            page_updates=PageUpdates.of(owner, index, owner * pages + index),
            new_rows=[RowState(row, params, row, seq_lens[rows.index(row)], _NOTHING, _NOTHING, _NOTHING) for row in new],
            **sampling.flags(),
        )
        return launch(self.runner, step)

    def fill_rows(self, count: int) -> None:
        """Every decode row needs a prompt in the cache, once."""
        plan = self.plan
        while self._filled < count:
            together = min(plan.together, plan.max_rows - self._filled)
            prompts = [self.random_prompt(plan.context, self._filled + row) for row in range(together)]
            self.runner.fetch(self.prefill(prompts, self._filled))
            self._filled += together

    def random_prompt(self, length: int, seed: int) -> np.ndarray:
        vocab_size = self.runner.spec.vocab_size
        return np.random.default_rng(seed).integers(0, vocab_size, length, np.int32)
