"""What a model's tokens and pairs of tokens take to compute: numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.models import ModelConfig
from jaxserve.models.specs import (
    AttentionMixer,
    DenseMLPSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MoESpec,
    SelfAttentionSpec,
    StateMixer,
)
from jaxserve.models.step_work import attention_work_ratio

HIDDEN = 32
MLP = DenseMLPSpec(intermediate_size=64)
MLP_WORK = 32 * 64 * 3
ATTENTION = SelfAttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
ATTENTION_WORK = 32 * (32 + 16 + 16) + 32 * 32  # queries, keys, values; outputs
PAIR = 2 * 32  # a score and a value's share, in 4 heads of 8
LATENT = LatentAttentionSpec(num_heads=4, q_lora_rank=None, kv_lora_rank=16, nope_dim=12, rope_dim=8, v_dim=12, scale=1.0)
LATENT_REST = 32 * 24 + 16 * 4 * (12 + 12) + 48 * 32  # a row; keys and values made of it; outputs
LATENT_PAIR = 4 * 20 + 4 * 12
DELTA = GatedDeltaNetSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=4, conv_size=4)
DELTA_WORK = 32 * (16 + 16 + 16 + 16 + 4 + 4) + 16 * 32  # queries, keys, values, gates, two numbers per head; outputs
MAMBA = Mamba2Spec(num_heads=4, head_dim=8, state_dim=4, num_groups=2, conv_size=4)
MAMBA_WORK = 32 * (32 + 32 + 8 + 8 + 4) + 32 * 32  # gates, x, B, C, time steps; outputs


def ratio_of(*layers: tuple[AttentionMixer | StateMixer, DenseMLPSpec | MoESpec]) -> float:
    return attention_work_ratio(
        ModelConfig(
            architecture="Any", vocab_size=100, hidden_size=HIDDEN, max_position_embeddings=64,
            layers=tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in layers),
        )
    )  # fmt: skip


def test_dense_layers() -> None:
    assert ATTENTION_WORK + MLP_WORK == 9216
    assert ratio_of((ATTENTION, MLP)) == ratio_of((ATTENTION, MLP), (ATTENTION, MLP)) == pytest.approx(64 / 9216)
    plain = dataclasses.replace(MLP, is_gated=False)
    assert ratio_of((ATTENTION, plain)) == pytest.approx(64 / (9216 - 32 * 64))
    gated = dataclasses.replace(ATTENTION, gates_output=True)
    assert ratio_of((gated, MLP)) == pytest.approx(64 / (9216 + 32 * 32))


def test_full_windows_are_work_of_each_token() -> None:
    windowed = dataclasses.replace(ATTENTION, window=10)
    chunked = dataclasses.replace(windowed, is_chunked=True)
    assert ratio_of((windowed, MLP)) == ratio_of((chunked, MLP)) == 0.0
    assert ratio_of((ATTENTION, MLP), (windowed, MLP)) == pytest.approx(64 / (2 * 9216 + 10 * 64))
    assert ratio_of((ATTENTION, MLP), (chunked, MLP)) == pytest.approx(64 / (2 * 9216 + 5 * 64)), "half a chunk on average"


@pytest.mark.parametrize(("q_lora_rank", "to_queries"), [(None, 32 * 80), (8, 32 * 8 + 8 * 80)])
def test_latents(q_lora_rank: int | None, to_queries: int) -> None:
    latent = dataclasses.replace(LATENT, q_lora_rank=q_lora_rank)
    assert ratio_of((latent, MLP)) == pytest.approx(LATENT_PAIR / (to_queries + LATENT_REST + MLP_WORK))


@pytest.mark.parametrize(("mixer", "work"), [(DELTA, DELTA_WORK), (MAMBA, MAMBA_WORK)])
def test_layers_with_states_do_not_grow(mixer: StateMixer, work: int) -> None:
    assert ratio_of((mixer, MLP)) == 0.0
    layers = [(mixer, MLP)] * 3 + [(ATTENTION, MLP)]
    assert ratio_of(*layers) == pytest.approx(PAIR / (3 * work + ATTENTION_WORK + 4 * MLP_WORK))


def test_of_experts_those_that_a_token_goes_to() -> None:
    experts = MoESpec(num_experts=8, experts_per_token=2, intermediate_size=16)
    work = ATTENTION_WORK + 32 * 8 + 2 * 3 * 32 * 16
    assert ratio_of((ATTENTION, experts)) == pytest.approx(PAIR / work)
    shared = dataclasses.replace(experts, shared=DenseMLPSpec(intermediate_size=24))
    assert ratio_of((ATTENTION, shared)) == pytest.approx(PAIR / (work + 3 * 32 * 24))
