"""Attention by data parallelism on fake devices: a runner with shards, driven by hand, gives Transformers' tokens; those that
masks allow, where there are some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_model
from driven_runner import MAX_ROWS, Driver, Oracle, small_runner

from jaxserve.executor import ModelRunner
from jaxserve.runner import launch
from jaxserve.types import ForwardMode

CASES: list[tuple[str, dict[str, Any]]] = [
    # With drafts a row has several lines of logits. None is accepted here: each decode step adds one token.
    ("qwen3", {"attn_dp_size": 2, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}),
    ("qwen3-moe", {"attn_dp_size": 4}),
    ("deepseek-v3", {"attn_dp_size": 2}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, dict[str, Any]]:
    name, options = request.param
    return checkpoint(name), options


@pytest.fixture(scope="module")
def runner(case: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return small_runner(case[0], tmp_path_factory.mktemp("cache"), tp_size=4, **case[1])


def test_rows_of_all_shards_get_the_models_tokens(runner: ModelRunner, case: tuple[Path, dict[str, Any]]) -> None:
    driver = Driver(runner)
    rng = np.random.default_rng(0)
    sequences = {row: rng.integers(3, 250, 3 + row).tolist() for row in range(MAX_ROWS)}
    check = Oracle(case[0], sequences).check

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


# Rows with prompts and rows that decode. Two shards have rows 0 to 3 and 4 to 7, four have two each.
MASKED_STEPS: list[tuple[list[int], list[int]]] = [
    ([5, 0, 6], []),
    ([7, 1], [6, 0]),
    ([], [7, 0, 5, 1, 6]),
    ([], [1]),  # one row of one shard
    ([3, 2], []),  # the others idle
    ([4], [3, 7, 0, 2]),
    ([], [4, 2, 7, 1, 5, 0, 3, 6]),  # no padding
    ([], [7, 6]),
    ([], [6, 0, 3]),
]


def test_masks_hold_for_the_rows_of_all_shards(runner: ModelRunner, case: tuple[Path, dict[str, Any]]) -> None:
    """Each row has a set of its own, and every third none: under another's it would hardly get its token."""
    driver, model, spec = Driver(runner), load_model(case[0]), runner.spec
    rng = np.random.default_rng(1)
    sequences = {row: rng.integers(3, 250, 4 + row).tolist() for row in range(MAX_ROWS)}
    num_other = 0
    for number, (prompts, decode) in enumerate(MASKED_STEPS):
        step = dataclasses.replace(driver.step({row: list(sequences[row]) for row in prompts}, decode), needs_masks=True)
        places = spec.num_draft_tokens if step.mode is ForwardMode.DECODE else 1
        is_allowed = rng.random((step.num_rows, places, 32 * spec.mask_words)) < 1 / 16
        is_allowed[number % 3 :: 3] = True
        masks = np.packbits(is_allowed, axis=-1, bitorder="little").view(np.int32)
        tokens = driver.fetch((step, launch(runner, step, masks)))
        for row, of_row in zip(step.rows.tolist(), is_allowed[:, 0, : spec.vocab_size], strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([sequences[row]])).logits[0, -1].numpy()
            assert tokens[row] == np.where(of_row, logits, -np.inf).argmax(), (number, row)
            num_other += tokens[row] != logits.argmax()
            sequences[row].append(tokens[row])
    assert num_other > 12, "the masks rule out what the model would say"
    assert runner.internal_state()["compiles_after_ready_total"] == 0
