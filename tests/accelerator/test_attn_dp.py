"""Steps with attention by data parallelism, compiled from shapes alone: which collectives there are, and the cache in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.model_configs import DEEPSEEK_V3, QWEN3_30B_A3B, write_config
from jaxserve.aot.shard_collectives import expected_with_shards
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts

pytestmark = pytest.mark.compile

MODELS = {
    "DeepSeek-V3": {**DEEPSEEK_V3, "num_hidden_layers": 4},
    "Qwen3-30B-A3B": {**QWEN3_30B_A3B, "num_hidden_layers": 2},
}
NUM_PAGES = 16384


@pytest.mark.parametrize(
    ("model", "topology", "tp_size", "attn_dp_size"),
    [
        ("DeepSeek-V3", "h200:8", 8, 8),
        ("Qwen3-30B-A3B", "h200:8", 8, 4),
        ("Qwen3-30B-A3B", "v6e:2x4", 8, 8),
        ("Qwen3-30B-A3B", "v6e:2x4", 8, 4),
    ],
)
def test_tokens_come_together_and_the_cache_stays(
    model: str, topology: str, tp_size: int, attn_dp_size: int, tmp_path: Path, prove: Callable[..., Facts]
) -> None:
    if topology.startswith("v6e"):
        pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")
    config = ModelConfig.from_pretrained(write_config(tmp_path, MODELS[model]))
    args = ServerArgs(model_path=str(tmp_path), tp_size=tp_size, attn_dp_size=attn_dp_size)
    mesh = make_mesh(tp_size, list(parse_target(topology).devices()), attn_dp_size=attn_dp_size)
    plan = Blueprint.draw(args, config, mesh)
    assert plan.backend.name == "pallas"
    pool_bytes = sum(plan.page_bytes) * NUM_PAGES
    balanced, packed = plan.buckets.extend[-2:]
    assert packed.packs_tokens and not balanced.packs_tokens
    for bucket in (plan.buckets.decode[-1], balanced, packed):
        facts = prove(plan.lower(bucket, plan.pages_each(NUM_PAGES)))
        expected = dict(expected_with_shards(plan.config, tp_size, packs_tokens=bucket.packs_tokens))
        sums, gathers, scatters = (expected.get(name, 0) for name in ("all-reduce", "all-gather", "reduce-scatter"))
        allowed = [expected]
        if topology.startswith("v6e"):
            # Few rows of logits are gathered by adding them up, each device's part in its place; and many tokens are scattered
            # within groups of the devices by adding up all of them and passing each its part.
            allowed += [expected | {"all-reduce": sums + 1, "all-gather": gathers - 1}]
            if attn_dp_size < tp_size:
                allowed += [{"all-reduce": sums + scatters, "collective-permute": scatters, "all-gather": gathers}]
        assert facts.collectives in allowed, f"{bucket.name}: {json.dumps(facts.collectives)}"
        assert facts.aliased_bytes >= pool_bytes > facts.temp_bytes
        assert all(kernel.spill_bytes == 0 and not kernel.warnings for kernel in facts.gpu_kernels), facts.gpu_kernels
