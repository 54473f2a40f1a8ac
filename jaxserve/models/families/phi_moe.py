"""Phi-3.5-MoE: mixtures routed by sparsemixer, layer norms, and LongRoPE with stretches of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_activation,
    read_attention,
    read_layer_norm,
    repeated,
    required_int,
)
from jaxserve.models.families.mixtral import MIXTRAL_NAMES
from jaxserve.models.specs import LayerSpec, MoESpec, RouterSpec

_DEFAULTS: dict[str, Any] = {
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "router_jitter_noise": 0.01,
}


def read_phimoe(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    moe = MoESpec(
        num_experts=required_int(raw, "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(scoring="sparsemixer", jitter=float(raw["router_jitter_noise"])),
    )
    layer = LayerSpec(
        mixer=read_attention(raw, qkv_bias=bias, o_bias=bias, window=raw.get("sliding_window")),
        mlp=moe,
        norm=read_layer_norm(raw, "rms_norm_eps", bias=True),
    )
    return repeated(raw, layer, lm_head_bias=bool(raw.get("lm_head_bias", False)), tensor_names=MIXTRAL_NAMES)


FAMILIES = (
    Family("PhimoeForCausalLM", "phimoe", read_phimoe, _DEFAULTS),
    Family("PhiMoEForCausalLM", "phimoe", read_phimoe, _DEFAULTS),  # as the published file says
)
