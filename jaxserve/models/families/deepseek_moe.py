"""DeepSeek-MoE, the first of DeepSeek's (https://arxiv.org/abs/2401.06066): Llama with mixtures of many small experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_activation,
    read_attention,
    read_dense_mlp,
    read_norm,
    required_int,
)
from jaxserve.models.specs import DenseMLPSpec, LayerSpec, MoESpec, RouterSpec

_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}


def read_deepseek(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    dense = LayerSpec(mixer=read_attention(raw, qkv_bias=bias, o_bias=bias), mlp=read_dense_mlp(raw), norm=read_norm(raw))
    sparse = dataclasses.replace(dense, mlp=_moe(raw))
    first, step = int(raw["first_k_dense_replace"]), required_int(raw, "moe_layer_freq")
    num_layers = required_int(raw, "num_hidden_layers")
    return FamilyTraits(tuple(sparse if layer >= first and layer % step == 0 else dense for layer in range(num_layers)))


def _moe(raw: Mapping[str, Any]) -> MoESpec:
    size, act, num_shared = required_int(raw, "moe_intermediate_size"), read_activation(raw), raw.get("n_shared_experts")
    return MoESpec(
        num_experts=required_int(raw, "n_routed_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=size,
        act=act,
        router=RouterSpec(scoring=str(raw["scoring_func"]), normalizes=bool(raw["norm_topk_prob"])),
        shared=DenseMLPSpec(intermediate_size=size * num_shared, act=act) if num_shared else None,
    )


FAMILIES = (Family("DeepseekForCausalLM", "deepseek", read_deepseek, _DEFAULTS),)
