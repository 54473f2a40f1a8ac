"""What a prompt's step takes beside weights and caches is what a layer takes, however many layers there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_configs import DEEPSEEK_V3, LLAMA_8B, QWEN3_30B_A3B, QWEN3_NEXT_80B_A3B, write_config
from jaxserve.aot.targets import gpu_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts

pytestmark = pytest.mark.compile

# Wherever there are two kinds of layers, both numbers of layers have both.
LATENTS = {**DEEPSEEK_V3, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 1, "topk_group": 1}
STATES = {**QWEN3_NEXT_80B_A3B, "num_experts": 16}
MODELS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "latents": (LATENTS, (2, 4), "pallas"),
    "states": (STATES, (4, 8), "pallas"),
    "experts": (QWEN3_30B_A3B, (2, 4), "pallas"),
    "reference": (LLAMA_8B, (2, 4), "reference"),
}


@pytest.mark.parametrize("model", MODELS)
def test_deeper_models_take_no_more(model: str, tmp_path: Path, prove: Callable[..., Facts]) -> None:
    raw, depths, backend = MODELS[model]
    taken = []
    for num_layers in depths:
        config = ModelConfig.from_pretrained(
            write_config(tmp_path, {**raw, "num_hidden_layers": num_layers, "vocab_size": 16384})
        )
        args = ServerArgs(model_path=str(tmp_path), tp_size=2, max_running_requests=64, attention_backend=backend)
        plan = Blueprint.draw(args, config, make_mesh(2, list(gpu_devices("h200", 2))))
        facts = prove(plan.lower(plan.buckets.extend[-1], plan.pages_each(1024)))
        taken.append(facts.temp_bytes)
    # An array of a layer's results, which nothing may keep for each layer, is 64 MiB or more here.
    assert taken[1] - taken[0] < 16 << 20, f"{depths} layers take {taken} bytes"
