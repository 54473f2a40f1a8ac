"""OLMoE: Llama with mixtures of many small experts, and norms over all heads of queries or keys together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    first_int,
    read_activation,
    read_attention,
    read_norm,
    repeated,
    required_int,
)
from jaxserve.models.specs import LayerSpec, MoESpec, RouterSpec

_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False}


def read_olmoe(raw: Mapping[str, Any]) -> FamilyTraits:
    if raw.get("clip_qkv") is not None:
        raise ValueError(f"clip_qkv must be null, as queries, keys and values are not clipped here; got {raw['clip_qkv']}.")
    norm, bias = read_norm(raw), bool(raw.get("attention_bias", False))
    moe = MoESpec(
        num_experts=first_int(raw, "num_experts", "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(normalizes=bool(raw["norm_topk_prob"])),
    )
    mixer = read_attention(raw, qkv_bias=bias, o_bias=bias, qk_norm=norm, qk_norm_over="all_heads")
    return repeated(raw, LayerSpec(mixer=mixer, mlp=moe, norm=norm))


FAMILIES = (Family("OlmoeForCausalLM", "olmoe", read_olmoe, _DEFAULTS),)
