"""A runner driven by hand: rows that grow step by step, and Transformers' tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_model

from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build, build_runner
from jaxserve.runner import NO_SLOT, AdapterLoad, PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

NOTHING = np.zeros(0, np.int32)
MAX_ROWS = 8


def ints(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


class Driver:
    """Rows that grow step by step; each has the pages of its shard's pools that follow from its row."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, int] = {}  # of the adapters that rows begin with
        self.pages_per_row = [group.num_pages // runner.spec.rows_per_shard for group in runner.spec.kv_groups]

    def step(self, prompts: dict[int, list[int]], decode: list[int], loads: Sequence[AdapterLoad] = ()) -> StepInput:
        """More tokens of some rows, and one more of those that decode."""
        rows = [*decode, *prompts]
        new = [row for row in prompts if row not in self.lengths]
        lens = [1] * len(decode) + [len(tokens) for tokens in prompts.values()]
        updates = []
        for row, count in zip(rows, lens, strict=True):
            start = self.lengths.get(row, 0)
            for group, pages in enumerate(self.pages_per_row):
                first = row % self.runner.spec.rows_per_shard * pages
                updates += [(row, at, first + at, group) for at in range(start, start + count)]
            self.lengths[row] = start + count
        sampling = SamplingParams(temperature=0)
        return StepInput(
            mode=ForwardMode.MIXED if decode and prompts else ForwardMode.EXTEND if prompts else ForwardMode.DECODE,
            rows=ints(rows),
            seq_lens=ints([self.lengths[row] for row in rows]),
            extend_lens=ints(lens),
            num_decode_rows=len(decode),
            input_ids=ints([token for tokens in prompts.values() for token in tokens]),
            sample=np.ones(len(rows), bool),
            page_updates=PageUpdates(*(ints(list(column)) for column in zip(*updates, strict=True))),
            new_rows=[
                RowState(
                    row,
                    sampling,
                    0,
                    len(prompts[row]),
                    NOTHING,
                    NOTHING,
                    ints(prompts[row]),
                    adapter_slot=self.slots.get(row, NO_SLOT),
                )
                for row in new
            ],
            needs_sampling=False,
            needs_adjusting=False,
            needs_logprobs=False,
            needs_top_logprobs=False,
            adapter_loads=loads,
        )

    def launch(self, prompts: dict[int, list[int]], decode: list[int] | None = None, loads: Sequence[AdapterLoad] = ()) -> Any:
        """What `fetch` takes."""
        step = self.step(prompts, decode or [], loads)
        return step, launch(self.runner, step)

    def fetch(self, launched: Any) -> dict[int, int]:
        step, handle = launched
        return dict(zip(step.rows.tolist(), self.runner.fetch(handle).token_ids[:, 0].tolist(), strict=True))

    def run(
        self, prompts: dict[int, list[int]], decode: list[int] | None = None, loads: Sequence[AdapterLoad] = ()
    ) -> dict[int, int]:
        return self.fetch(self.launch(prompts, decode, loads))


class Oracle:
    """Sequences that grow by the tokens that Transformers expects."""

    def __init__(self, model: Path, sequences: dict[int, list[int]]) -> None:
        self._model = load_model(model)
        self.sequences = sequences

    def check(self, tokens: dict[int, int]) -> None:
        with torch.inference_mode():
            for row, token in tokens.items():
                assert token == int(self._model(torch.tensor([self.sequences[row]])).logits[0, -1].argmax()), row
                self.sequences[row].append(token)


def small_runner(model: Path, cache: Path, **options: Any) -> ModelRunner:
    """On fake devices of this process."""
    args = ServerArgs(
        model_path=str(model),
        page_size=1,
        max_total_tokens=MAX_ROWS * 64,
        max_running_requests=MAX_ROWS,
        context_length=64,
        chunked_prefill_size=32,
        decode_row_buckets=(MAX_ROWS,),
        compilation_cache_dir=str(cache),
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "select_devices", lambda device, num_devices: None)  # this process has its eight
        return build_runner(args, show_progress=False).runner
