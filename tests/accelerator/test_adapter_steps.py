"""Steps with LoRA adapters of a real model's shapes, compiled for H200 and TPU from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from benchmarks.model_configs import LLAMA_8B, write_config
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts

pytestmark = pytest.mark.compile

ROWS, TOKENS, NUM_PAGES, LAYERS = 64, 1024, 512, 2
SLOTS, RANK = 8, 16
# Of each of 4 matrices a product with A and one with B; and once for all layers, what sorts tokens by slot.
LAUNCHES_PER_LAYER, MOST_TO_SORT = 8, 5


@pytest.fixture(params=["h200:1", "h200:2", "v6e:2x2"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Blueprint:
    topology = request.param
    if topology.startswith("v6e"):
        pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")
    devices = list(parse_target(topology).devices())
    config = ModelConfig.from_pretrained(write_config(tmp_path, {**LLAMA_8B, "num_hidden_layers": LAYERS}))
    args = ServerArgs(
        model_path=str(tmp_path),
        tp_size=len(devices),
        max_running_requests=ROWS,
        decode_row_buckets=(ROWS,),
        chunked_prefill_size=TOKENS,
        prefill_token_buckets=(TOKENS,),
        enable_lora=True,
        max_loras_per_batch=SLOTS,
        max_lora_rank=RANK,
    )
    return Blueprint.draw(args, config, make_mesh(len(devices), devices))


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_step_with_adapters_adds_no_collective(plan: Blueprint, kind: str, prove: Callable[..., Facts]) -> None:
    bucket = plan.buckets.decode[-1] if kind == "decode" else plan.buckets.extend[-1]
    lowered = [plan.lower(one, plan.pages_each(NUM_PAGES)) for one in (bucket, bucket.with_adapters)]
    if plan.mesh.devices.flat[0].platform != "tpu":  # of 4 matrices; layers are alike, so one function of the module
        for kernel in ("low_rank_shrink", "low_rank_expand"):
            assert lowered[1].as_text().count(f'name = "{kernel}"') == 4
    base, adapted = map(prove, lowered)
    # An adapter is sharded as its base: what it adds is part of the sums that there are anyway.
    assert adapted.collectives == base.collectives == expected_collectives(plan.config, plan.args.tp_size)
    assert adapted.aliased_bytes == base.aliased_bytes
    # A token's products with A of all slots, in float32 and in the model's type, for three fused matrices; and what B makes of
    # them for the widest.
    per_token = SLOTS * RANK * 3 * 6 + LLAMA_8B["intermediate_size"] * 2 * 6
    assert adapted.temp_bytes <= base.temp_bytes + bucket.num_tokens * per_token
    if adapted.launches is not None and base.launches is not None:
        assert adapted.launches - base.launches <= LAYERS * LAUNCHES_PER_LAYER + MOST_TO_SORT


def test_an_adapter_goes_into_its_slot_in_place(plan: Blueprint, prove: Callable[..., Facts]) -> None:
    programs = plan.programs(plan.pages_each(NUM_PAGES))
    shapes = jax.tree.leaves(programs.adapter_shapes())
    pool_bytes = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in shapes)
    facts = prove(programs.lower_adapter())
    assert facts.aliased_bytes >= pool_bytes
    assert facts.temp_bytes < pool_bytes / SLOTS
