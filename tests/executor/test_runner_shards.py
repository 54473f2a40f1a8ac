"""Attention by data parallelism on fake devices: a runner with shards, driven by hand, gives Transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from driven_runner import MAX_ROWS, Driver, Oracle, small_runner

from jaxserve.executor import ModelRunner


@pytest.fixture(scope="module", params=[("qwen3", 4, 2), ("qwen3-moe", 4, 4), ("deepseek-v3", 4, 2)], ids=str)
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, int, int]:
    name, tp_size, attn_dp_size = request.param
    return checkpoint(name), tp_size, attn_dp_size


@pytest.fixture(scope="module")
def runner(case: tuple[Path, int, int], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model, tp_size, attn_dp_size = case
    return small_runner(model, tmp_path_factory.mktemp("cache"), tp_size=tp_size, attn_dp_size=attn_dp_size)


def test_rows_of_all_shards_get_the_models_tokens(runner: ModelRunner, case: tuple[Path, int, int]) -> None:
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
