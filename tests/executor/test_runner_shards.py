"""Attention by data parallelism on fake devices: a runner with shards, driven by hand, gives Transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import load_model

from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build, build_runner
from jaxserve.runner import PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

NOTHING = np.zeros(0, np.int32)
MAX_ROWS = 8


def ints(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


class Driver:
    """Rows that grow step by step; each has the pages of its shard that follow from its row."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.lengths: dict[int, int] = {}
        self.pages_per_row = runner.spec.kv_groups[0].num_pages // runner.spec.rows_per_shard

    def step(self, prompts: dict[int, list[int]], decode: list[int]) -> StepInput:
        """More tokens of some rows, and one more of those that decode."""
        rows = [*decode, *prompts]
        new = [row for row in prompts if row not in self.lengths]
        lens = [1] * len(decode) + [len(tokens) for tokens in prompts.values()]
        updates = []
        for row, count in zip(rows, lens, strict=True):
            start = self.lengths.get(row, 0)
            first = row % self.runner.spec.rows_per_shard * self.pages_per_row
            updates += [(row, at, first + at) for at in range(start, start + count)]
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
            page_updates=PageUpdates.of(*(ints(list(column)) for column in zip(*updates, strict=True))),
            new_rows=[RowState(row, sampling, 0, len(prompts[row]), NOTHING, NOTHING, ints(prompts[row])) for row in new],
            needs_sampling=False,
            needs_adjusting=False,
            needs_logprobs=False,
            needs_top_logprobs=False,
        )

    def run(self, prompts: dict[int, list[int]], decode: list[int] | None = None) -> dict[int, int]:
        step = self.step(prompts, decode or [])
        tokens = self.runner.fetch(launch(self.runner, step)).token_ids[:, 0].tolist()
        return dict(zip(step.rows.tolist(), tokens, strict=True))


@pytest.fixture(scope="module", params=[("qwen3", 4, 2), ("qwen3-moe", 4, 4), ("deepseek-v3", 4, 2)], ids=str)
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, int, int]:
    name, tp_size, attn_dp_size = request.param
    return checkpoint(name), tp_size, attn_dp_size


@pytest.fixture(scope="module")
def runner(case: tuple[Path, int, int], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model, tp_size, attn_dp_size = case
    args = ServerArgs(
        model_path=str(model),
        tp_size=tp_size,
        attn_dp_size=attn_dp_size,
        page_size=1,
        max_total_tokens=MAX_ROWS * 64,
        max_running_requests=MAX_ROWS,
        context_length=64,
        chunked_prefill_size=32,
        decode_row_buckets=(MAX_ROWS,),
        compilation_cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
        return build_runner(args, show_progress=False).runner


def test_rows_of_all_shards_get_the_models_tokens(runner: ModelRunner, case: tuple[Path, int, int]) -> None:
    driver = Driver(runner)
    torch_model = load_model(case[0])
    rng = np.random.default_rng(0)
    sequences = {row: rng.integers(3, 250, 3 + row).tolist() for row in range(MAX_ROWS)}

    def check(tokens: dict[int, int]) -> None:
        with torch.inference_mode():
            for row, token in tokens.items():
                assert token == int(torch_model(torch.tensor([sequences[row]])).logits[0, -1].argmax()), row
                sequences[row].append(token)

    last = MAX_ROWS - 1
    check(driver.run({row: sequences[row] for row in (1, 0)}))  # of one shard alone
    check(driver.run({row: sequences[row] for row in (2, last, 3)}))
    check(driver.run({4: sequences[4]}, decode=[last, 1, 0]))
    for decoding in ([0, 1, 2, 3, 4, last], [last], [2, 0], [4, 3, last, 1]):
        check(driver.run({}, decode=decoding))
    long = rng.integers(3, 250, 30).tolist()
    sequences[5] = long
    check(driver.run({5: long}))
    check(driver.run({6: sequences[6]}, decode=[5, 2]))
