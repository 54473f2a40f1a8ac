"""Pipelines on fake devices: a runner with stages, driven by hand with several steps under way, gives Transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven_runner import MAX_ROWS, Driver, Oracle, small_runner

from jaxserve.executor import ModelRunner

CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"pp_size": 2}),
    ("deepseek-v3", {"pp_size": 2, "tp_size": 2, "attn_dp_size": 2}),  # its first stage has no experts
    ("bamba", {"pp_size": 3, "tp_size": 2}),
    ("gemma3", {"pp_size": 4}),  # stages without a layer that sees everything, and tied embeddings
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, dict[str, Any]]:
    name, options = request.param
    return checkpoint(name), options


@pytest.fixture(scope="module")
def runner(case: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return small_runner(case[0], tmp_path_factory.mktemp("cache"), **case[1])


def test_steps_under_way_in_all_stages_get_the_models_tokens(runner: ModelRunner, case: tuple[Path, dict[str, Any]]) -> None:
    driver = Driver(runner)
    rng = np.random.default_rng(0)
    oracle = Oracle(case[0], {row: rng.integers(3, 250, 3 + row).tolist() for row in range(MAX_ROWS)})
    prompts = oracle.sequences

    even, odd = [0, 2, 4], [1, 3, 5]
    launched = [driver.launch({row: list(prompts[row]) for row in rows}) for rows in (even, odd)]
    # Those that decode are not known to the host yet; each step has other rows than the ones under way, but for the last two.
    launched += [driver.launch({}, decode=rows) for rows in (even, odd, even, odd, odd)]
    launched.append(driver.launch({6: list(prompts[6])}, decode=[0, 1]))
    launched.append(driver.launch({}, decode=[6, 0, 5]))
    for step in launched:
        oracle.check(driver.fetch(step))
