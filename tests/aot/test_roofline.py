"""The roofline's arithmetic, against counts by definition and numbers one can work out by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import pytest
from shapes import TINY, TINY_LATENT, config_of

from benchmarks.model_configs import LLAMA_8B
from jaxserve.aot.chips import H200, TPU7X, V6E
from jaxserve.aot.roofline import Interconnect, ModelShard, Prediction, StepShape, _attended, predict, step_work, weight_bytes
from jaxserve.models import abstract_params


@pytest.mark.parametrize("windows", [(None,), (3,), (1, None, 7)])
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 9), (4, 4), (5, 12), (12, 12)])
def test_what_is_attended_to(windows: tuple[int | None, ...], new: int, context: int) -> None:
    pairs, keys = 0, 0
    for window in windows:
        seen = [range(max(p - (window or context) + 1, 0), p + 1) for p in range(context - new, context)]
        pairs += sum(map(len, seen))
        keys += len(set().union(*seen))
    assert _attended(windows, StepShape(1, new, context)) == (pairs, keys)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_one_device(tied: bool, tmp_path: Path) -> None:
    config = config_of(tmp_path, {**TINY, "tie_word_embeddings": tied})
    whole = sum(info.num_bytes for info in jax.tree.leaves(abstract_params(config, "bfloat16", 1)))
    assert weight_bytes(config, "bfloat16", 1) == whole
    norms = (2 * 2 + 1) * 32 * 2  # not split
    assert weight_bytes(config, "bfloat16", 2) == (whole - norms) // 2 + norms


def test_int8_weights_take_a_byte_and_their_scales_four(tmp_path: Path) -> None:
    plain = config_of(tmp_path, TINY)
    int8 = plain.replace(quantization="int8wo")
    matrices = [info for info in jax.tree.leaves(abstract_params(plain, "bfloat16", 1)) if len(info.shape) == 2]
    of_embedding = 100 * 32  # stays as it is
    saved = sum(info.shape[0] * info.shape[1] - 4 * info.shape[1] for info in matrices) - of_embedding + 4 * 32
    assert weight_bytes(plain, "bfloat16", 1) - weight_bytes(int8, "bfloat16", 1) == saved
    works = [step_work(ModelShard(config, "bfloat16", 1, 64), StepShape(2, 1, 8)) for config in (plain, int8)]
    assert works[0].weight_bytes - works[1].weight_bytes == saved
    assert works[0].matmul_flops == works[1].matmul_flops


def test_a_decode_step_counted_by_hand(tmp_path: Path) -> None:
    config = config_of(tmp_path, TINY)
    rows, context, token_bytes = 3, 10, 2 * 1 * 8 * 2  # K and V of one of the two KV heads
    work = step_work(ModelShard(config, "bfloat16", 2, token_bytes), StepShape(rows, 1, context))
    layer = 32 * (2 + 1 + 1) * 8 + 2 * 8 * 32 + 3 * 32 * 32  # qkv, o, and the MLP's three, of one of two devices
    assert work.matmul_flops == 2 * rows * (2 * layer + 32 * 50)
    assert work.attention_flops == 2 * 4 * rows * context * 2 * 8  # two layers, two heads of 8
    assert work.kv_read_bytes == 2 * rows * context * token_bytes
    assert work.kv_write_bytes == 2 * rows * token_bytes
    assert work.logits_bytes == work.all_gather_bytes == rows * 100 * 4
    assert work.all_reduce_bytes == 5 * rows * 32 * 2
    embedding = 100 * 32 * 2
    assert work.weight_bytes == weight_bytes(config, "bfloat16", 2) - embedding // 2 + rows * 32 * 2


@pytest.mark.parametrize("quantization", [None, "int8wo"])
def test_experts_that_are_chosen_are_counted(quantization: str | None, tmp_path: Path) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = config_of(tmp_path, {**TINY, **moe}).replace(quantization=quantization)
    shard = ModelShard(config, "bfloat16", 2, 64)
    one, many = (step_work(shard, StepShape(rows, 1, 8)) for rows in (1, 1000))
    attention, router, expert = 32 * (2 + 1 + 1) * 8 + 2 * 8 * 32, 32 * 8, 3 * 32 * 16
    assert one.matmul_flops == 2 * (2 * (attention + router + 2 * expert // 2) + 32 * 50)  # a device computes one of the two
    expert_bytes = expert + 4 * (2 * 16 + 32) if quantization else 2 * expert
    assert many.weight_bytes - one.weight_bytes == 2 * (4 - 1) * expert_bytes + (1000 - 1) * 32 * 2


def test_attention_over_latents_scores_whole_rows_and_sums_their_first_part(tmp_path: Path) -> None:
    work = step_work(ModelShard(config_of(tmp_path, TINY_LATENT), "bfloat16", 2, 24 * 2), StepShape(3, 1, 10))
    assert work.attention_flops == 2 * 2 * 3 * 10 * 2 * (24 + 16)  # two layers, two heads


def test_long_prompts_over_latents_are_projected(tmp_path: Path) -> None:
    """16 x (12 + 12) products to project a token, 2 x 16 - (12 + 12) saved for each query and key: from 48 queries on."""
    shard = ModelShard(config_of(tmp_path, TINY_LATENT), "bfloat16", 2, 24 * 2)
    short, long = (step_work(shard, StepShape(1, new_tokens, 60)).attention_flops for new_tokens in (47, 48))
    pairs = {n: sum(range(60 - n + 1, 61)) for n in (47, 48)}
    assert short == 2 * 2 * 2 * pairs[47] * (24 + 16)  # two layers, two heads
    assert long == 2 * 2 * 2 * (pairs[48] * (20 + 12) + 12 * 16 * (12 + 12))


def test_devices_that_share_latents_send_queries_or_latents(tmp_path: Path) -> None:
    shard = ModelShard(config_of(tmp_path, TINY_LATENT), "bfloat16", 2, 24, dcp_size=2)
    alone = dataclasses.replace(shard, dcp_size=1)
    queries, latents = 2 * 3 * 4 * ((24 + 16) * 2 + 4), 2 * 3 * 60 * 24 * 2  # of two layers, three rows, four heads
    for new_tokens, sent in ((1, queries), (48, latents)):
        shared, whole = (step_work(each, StepShape(3, new_tokens, 60)).all_gather_bytes for each in (shard, alone))
        assert shared - whole == sent


def test_one_device_sends_nothing(tmp_path: Path) -> None:
    work = step_work(ModelShard(config_of(tmp_path, TINY), "float32", 1, 64), StepShape(1, 1, 1))
    assert (work.all_reduce_bytes, work.all_gather_bytes) == (0, 0)
    assert predict(work, V6E, "float32", Interconnect.of(V6E, 1, 0)).interconnect_s == 0


def test_sums_over_links() -> None:
    ring = Interconnect.of(V6E, 8, 2)
    assert ring.all_reduce_s(10**9) == pytest.approx(2 * 7 / 8 * 1e9 / 200e9)
    assert ring.all_gather_s(10**9) == pytest.approx(7 / 8 * 1e9 / 200e9)
    assert Interconnect.of(H200, 4, 1).all_reduce_s(10**9) == pytest.approx(2 * 3 / 4 * 1e9 / 450e9)
    hosts = Interconnect.of(H200, 16, 1)  # the GPUs of a host first, then two hosts, each with eight network cards
    assert hosts.all_reduce_s(10**9) == pytest.approx(1e9 / 400e9 + 2 * 7 / 8 * 1e9 / 450e9)
    halves = Interconnect.of(TPU7X, 8, 2)  # the two halves of a chip first, then four chips
    assert halves.all_reduce_s(10**9) == pytest.approx(2 * 3 / 4 * 1e9 / 200e9 + 1e9 / 600e9)
    assert Interconnect.of(TPU7X, 2, 0).all_gather_s(10**9) == pytest.approx(0.5 * 1e9 / 600e9)


def test_bounds() -> None:
    assert Prediction(3, 2, 1).bound == "memory"
    assert Prediction(1, 2, 1).bound == "compute"
    assert Prediction(1, 2, 3).bound == "interconnect"
    assert Prediction(1, 2, 3).step_s == 5


def test_llama_8b_on_one_h200_reads_its_weights(tmp_path: Path) -> None:
    config = config_of(tmp_path, LLAMA_8B)
    shard = ModelShard(config, "bfloat16", 1, 2 * 8 * 128 * 2)
    assert shard.weight_bytes == pytest.approx(8.03e9 * 2, rel=0.001)
    one = predict(step_work(shard, StepShape(1, 1, 1)), H200, "bfloat16", Interconnect.of(H200, 1, 1))
    assert one.bound == "memory"
    assert one.step_s == pytest.approx((8.03e9 - 128256 * 4096) * 2 / 4.8e12, rel=0.001)
    prompt = predict(step_work(shard, StepShape(1, 8192, 8192)), H200, "bfloat16", Interconnect.of(H200, 1, 1))
    assert prompt.bound == "compute"
    assert math.isclose(prompt.step_s, (2 * 8192 * 6.98e9 + 4 * 32 * 128 * 32 * 8192**2 / 2) / 989.5e12, rel_tol=0.01)
