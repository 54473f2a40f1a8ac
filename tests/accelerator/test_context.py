"""Steps with context parallelism at 128k tokens, compiled from shapes alone: which collectives there are, what they take."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.model_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, write_config
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.shard_collectives import expected_of_context, expected_with_shards
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts

pytestmark = pytest.mark.compile

MODELS = {
    "DeepSeek-V3": {**DEEPSEEK_V3, "num_hidden_layers": 4},
    "DeepSeek-V2-Lite": {**DEEPSEEK_V2_LITE, "num_hidden_layers": 2},
}
CONTEXT_LEN = 131072


@pytest.mark.parametrize(
    ("model", "topology", "attn_dp_size", "dcp_size"),
    [
        ("DeepSeek-V3", "h200:8", 1, 8),
        ("DeepSeek-V3", "h200:8", 2, 4),
        ("DeepSeek-V2-Lite", "v6e:2x4", 1, 8),
        ("DeepSeek-V2-Lite", "v6e:2x4", 1, 4),
    ],
)
def test_what_devices_send_and_the_cache_in_place(
    model: str, topology: str, attn_dp_size: int, dcp_size: int, tmp_path: Path, prove: Callable[..., Facts]
) -> None:
    if topology.startswith("v6e"):
        pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")
    config = ModelConfig.from_pretrained(write_config(tmp_path, MODELS[model]))
    args = ServerArgs(
        model_path=str(tmp_path), tp_size=8, attn_dp_size=attn_dp_size, dcp_size=dcp_size, context_length=CONTEXT_LEN
    )
    mesh = make_mesh(8, list(parse_target(topology).devices()), attn_dp_size=attn_dp_size)
    plan = Blueprint.draw(args, config, mesh)
    assert plan.backend.name == "pallas" and plan.page_size == dcp_size * plan.backend.default_page_size
    num_pages = 4 * CONTEXT_LEN // plan.page_size
    pool_bytes = sum(plan.page_bytes) * num_pages
    for bucket in (plan.buckets.decode[-1], plan.buckets.extend[-1]):
        facts = prove(plan.lower(bucket, plan.pages_each(num_pages)))
        if attn_dp_size == 1:
            without = expected_collectives(plan.config, 8)
        else:
            without = expected_with_shards(plan.config, 8, packs_tokens=bucket.packs_tokens)
        of_context = expected_of_context(plan.config, expands=not bucket.decode_only)
        expected = dict(collections.Counter(without) + collections.Counter(of_context))
        assert facts.collectives == expected, f"{bucket.name}: {json.dumps(facts.collectives)}, not {json.dumps(expected)}"
        assert facts.aliased_bytes >= pool_bytes, f"{bucket.name}: {facts.aliased_bytes} of {pool_bytes}"
        assert facts.temp_bytes < 4 << 30, f"{bucket.name}: {facts.temp_bytes / 2**30:.2f} GiB"
        assert all(kernel.spill_bytes == 0 and not kernel.warnings for kernel in facts.gpu_kernels), facts.gpu_kernels
