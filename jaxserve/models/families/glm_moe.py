"""GLM-4.5: heads that are rotated in part, and mixtures of experts behind some dense layers.

Experts are chosen by the sigmoids of their scores plus a learned correction, from the best groups; shared experts come on top.
Tensors of the layers behind the last, which predict further tokens, are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    first_int,
    read_activation,
    read_attention,
    read_dense_mlp,
    read_head_dim,
    read_norm,
    required_int,
)
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import DenseMLPSpec, LayerSpec, MoESpec, RouterSpec

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_DEFAULT_ROTARY_FACTOR = 0.5


def read_glm4_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    norm = read_norm(raw)
    attention = read_attention(
        raw,
        rope=read_partial_rope(raw, read_head_dim(raw), default=_DEFAULT_ROTARY_FACTOR),
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=norm if raw.get("use_qk_norm") else None,
    )
    dense = LayerSpec(mixer=attention, mlp=read_dense_mlp(raw), norm=norm)
    sparse = dataclasses.replace(dense, mlp=_moe(raw))
    num_layers, first_sparse = required_int(raw, "num_hidden_layers"), int(raw["first_k_dense_replace"])
    return FamilyTraits(tuple(dense if layer < first_sparse else sparse for layer in range(num_layers)))


def _moe(raw: Mapping[str, Any]) -> MoESpec:
    size, act = required_int(raw, "moe_intermediate_size"), read_activation(raw)
    router = RouterSpec(
        scoring="sigmoid",
        corrects_choice=True,
        normalizes=bool(raw["norm_topk_prob"]),
        scaling=float(raw["routed_scaling_factor"]),
        num_groups=required_int(raw, "n_group"),
        chosen_groups=required_int(raw, "topk_group"),
        group_score="top2",
        in_float32=True,
    )
    return MoESpec(
        num_experts=first_int(raw, "n_routed_experts", "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=size,
        act=act,
        router=router,
        shared=DenseMLPSpec(intermediate_size=size * required_int(raw, "n_shared_experts"), act=act),
    )


FAMILIES = (Family("Glm4MoeForCausalLM", "glm4_moe", read_glm4_moe, _DEFAULTS),)
