"""Experts in steps for H200, compiled from shapes alone: one grouped product per projection, and no row written per expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.model_configs import GPT_OSS_120B, QWEN3_30B_A3B, write_config
from jaxserve.aot.targets import gpu_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts

pytestmark = pytest.mark.compile

LAYERS = 2  # of 48: they are alike
ROWS = 16
NUM_PAGES = 512


@pytest.mark.parametrize(
    ("model", "tp_size"), [(QWEN3_30B_A3B, 1), (QWEN3_30B_A3B, 4), (GPT_OSS_120B, 2)], ids=["qwen3", "qwen3-tp4", "gpt-oss-tp2"]
)
def test_a_decode_step_multiplies_experts_in_one_kernel_each(
    model: dict[str, Any], tp_size: int, tmp_path: Path, prove: Callable[..., Facts]
) -> None:
    write_config(tmp_path, {**model, "num_hidden_layers": LAYERS})
    args = ServerArgs(model_path=str(tmp_path), tp_size=tp_size, max_running_requests=ROWS)
    mesh = make_mesh(tp_size, list(gpu_devices("h200", tp_size)))
    plan = Blueprint.draw(args, ModelConfig.from_pretrained(tmp_path), mesh)
    bucket = plan.buckets.decode[-1]
    assert bucket.num_tokens == ROWS
    lowered = plan.lower(bucket, plan.pages_each(NUM_PAGES))
    # Gate and up are one matrix, so a layer has two products. Equal layers are one function of the module.
    kinds = len(set(plan.config.layers))
    assert lowered.as_text().count('name = "grouped_matmul"') == 2 * kinds
    facts = prove(lowered)
    chosen = ROWS * model["num_experts_per_tok"]
    largest = chosen * model["hidden_size"]  # elements: what the choices of all tokens read or answer
    pages = {(plan.config.num_layers * NUM_PAGES, *page.shape) for page in jax.tree.leaves(plan.backend.kv_pages())}
    # The step's hidden states are updated in place.
    others = {*pages, (ROWS, model["vocab_size"])}
    made = [array for array in facts.made if array.shape not in others and array.opcode != "dynamic-update-slice"]
    assert all(array.size <= largest for array in made), made
    assert facts.open_loops == 0 and facts.conditionals == 0
    # Rows written once per expert would be 67 MB on one device.
    assert facts.temp_bytes < 40e6
