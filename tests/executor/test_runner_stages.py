"""Pipelines on fake devices: a runner with stages, driven by hand with several steps under way, gives Transformers' tokens; and
what hosts know of the stages of others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from driven_runner import MAX_ROWS, Driver, Oracle, small_runner

from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.mesh import make_meshes
from jaxserve.executor.pooling import PoolingKey
from jaxserve.executor.programs import SamplingKey
from jaxserve.models import ModelConfig

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


def test_what_programs_give_is_known_to_those_who_do_not_run_them(checkpoint: Callable[[str], Path]) -> None:
    model = str(checkpoint("qwen3"))
    args = ServerArgs(
        model_path=model, pp_size=2, tp_size=2, attn_dp_size=2, page_size=16, max_running_requests=4, context_length=64,
        decode_row_buckets=(4,), prefill_token_buckets=(32,), speculative_algorithm="NGRAM", speculative_num_draft_tokens=3,
        enable_return_hidden_states=True, enable_custom_logit_processor=True,
    )  # fmt: skip
    compared = set()
    stages = Blueprint.draw_stages(args, ModelConfig.from_pretrained(model), make_meshes(2, 2, attn_dp_size=2))
    for blueprint in stages:
        programs = blueprint.programs(blueprint.pages_each(8))
        for key in blueprint.program_set.all:
            if isinstance(key, str) and key != "hidden_states":
                continue
            lowered = programs.lower(key, blueprint.abstract_params())
            given = lowered.out_info[1] if isinstance(key, Bucket | SamplingKey | PoolingKey) else lowered.out_info
            expected, tree = jax.tree.flatten(programs.outputs(key))
            found, found_tree = jax.tree.flatten(given)
            assert tree == found_tree, key
            assert [(leaf.shape, leaf.dtype) for leaf in expected] == [(leaf.shape, leaf.dtype) for leaf in found], key
            compared.add(type(key))
    assert len(compared) == 6, "forward, sampling, logits, scoring, pooling, hidden states"
