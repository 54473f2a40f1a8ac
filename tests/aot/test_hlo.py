"""What is read out of HLO."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from shapes import TINY, TINY_LATENT, config_of

from jaxserve.aot.hlo import TpuKernel, copies_of, count_collectives, expected_collectives, tpu_kernels
from jaxserve.aot.shard_collectives import expected_of_context, expected_with_shards
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh

HLO = """
%sum.clone (a: f32[], b: f32[]) -> f32[] {
%psum.1 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.60), channel_id=1, to_apply=%sum.clone, metadata={op_name="x/psum"}
%ag = (f32[8,50]{1,0}, f32[8,100]{1,0}) all-gather-start(%all-reduce.7), dimensions={1}
%agd = f32[8,100]{1,0} all-gather-done(%ag)
%gte = f32[8] get-tuple-element(%all-to-all.3), index=0
%k.1 = bf16[4] custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(run)/attend/write_kv/pallas_call"}, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"300"},{"memory_space":"0","offset":"0","size":"7"}],"scoped_memory_configs":[{"memory_space":"1","offset":"100","size":"900"}],"cost_estimate":{"flops":"1","bytes_accessed":"64"}}
%k.2 = bf16[4] custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(run)/attend/write_kv/pallas_call"}, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"200"}]}
%copy.1 = bf16[1024,1,128,256]{3,2,1,0} copy(%p)
%start = (bf16[1024,1,128,256]{3,2,1,0:S(1)}, bf16[1024,1,128,256]{3,2,1,0}, u32[]) copy-start(%p)
%done = bf16[1024,1,128,256]{3,2,1,0:S(1)} copy-done(%start)
%copy.2 = bf16[1024,1,128]{2,1,0} copy(%p)
"""  # noqa: E501


def test_reading() -> None:
    assert count_collectives(HLO) == {"all-reduce": 1, "all-gather": 1}
    assert tpu_kernels(HLO) == [TpuKernel("write_kv", 200, 900, 64), TpuKernel("write_kv", 200, 0, 0)]
    assert len(copies_of(HLO, (1024, 1, 128, 256))) == 2
    assert copies_of(HLO, (1024, 1)) == []


def test_a_step_has_the_collectives_it_should(tmp_path: Path) -> None:
    tp_size = 2
    config = config_of(tmp_path, TINY)
    args = ServerArgs(model_path=str(tmp_path), tp_size=tp_size, prefill_token_buckets=(16,), decode_row_buckets=(2,))
    blueprint = Blueprint.draw(args.replace(max_running_requests=2, chunked_prefill_size=16), config, make_mesh(tp_size))
    for bucket in blueprint.buckets.all:
        hlo = blueprint.lower(bucket, blueprint.pages_each(8)).compile().as_text()
        assert count_collectives(hlo) == expected_collectives(config, tp_size), bucket


@pytest.mark.parametrize("attn_dp_size", [2, 4])
def test_shards_exchange_tokens_and_nothing_else(attn_dp_size: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, TINY)
    args = ServerArgs(
        model_path=str(tmp_path),
        tp_size=4,
        attn_dp_size=attn_dp_size,
        prefill_token_buckets=(16,),
        decode_row_buckets=(4,),
        max_running_requests=4,
        chunked_prefill_size=16,
    )
    blueprint = Blueprint.draw(args, config, make_mesh(4, attn_dp_size=attn_dp_size))
    kinds = {(bucket.decode_only, bucket.packs_tokens) for bucket in blueprint.buckets.all}
    assert kinds == {(True, False), (False, False), (False, True)}
    for bucket in blueprint.buckets.all:
        hlo = blueprint.lower(bucket, blueprint.pages_each(8)).compile().as_text()
        expected = dict(expected_with_shards(blueprint.config, 4, packs_tokens=bucket.packs_tokens))
        if attn_dp_size == 4:  # XLA's CPU compiler keeps sums over one device
            over_one = config.num_layers * (1 if bucket.packs_tokens else 2) + (not bucket.packs_tokens)
            expected["all-reduce"] = expected.get("all-reduce", 0) + over_one
        assert count_collectives(hlo) == expected, bucket


def test_devices_that_share_latents_send_queries_or_latents(tmp_path: Path) -> None:
    """Rows of few queries and of many; in a step of a bucket of few tokens there are only the former."""
    config = config_of(tmp_path, TINY_LATENT)
    args = ServerArgs(
        model_path=str(tmp_path),
        tp_size=4,
        dcp_size=4,
        prefill_token_buckets=(16, 64),
        decode_row_buckets=(4,),
        max_running_requests=4,
        chunked_prefill_size=64,
    )
    blueprint = Blueprint.draw(args, config, make_mesh(4))
    assert blueprint.page_size == 4 * blueprint.backend.default_page_size
    for bucket in blueprint.buckets.all:
        hlo = blueprint.lower(bucket, blueprint.pages_each(8)).compile().as_text()
        expands = not bucket.decode_only and bucket.num_tokens == 64
        expected = collections.Counter(expected_collectives(config, 4))
        expected.update(expected_of_context(config, expands=expands))
        assert count_collectives(hlo) == dict(expected), bucket


def test_of_heads_there_is_nothing_to_share(tmp_path: Path) -> None:
    args = ServerArgs(model_path=str(tmp_path), tp_size=4, dcp_size=2)
    with pytest.raises(ValueError, match="--dcp-size 2 is for models with latent attention; LlamaForCausalLM keeps keys and"):
        Blueprint.draw(args, config_of(tmp_path, TINY), make_mesh(4))
