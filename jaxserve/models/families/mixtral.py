"""Mixtral: Mistral whose MLPs are mixtures of experts."""

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
from jaxserve.models.tensor_names import TensorNames

MIXTRAL_NAMES = TensorNames(
    renamed=(("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
)


def read_mixtral(raw: Mapping[str, Any]) -> FamilyTraits:
    moe = MoESpec(
        num_experts=first_int(raw, "num_local_experts", "num_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(normalizes=True),
    )
    layer = LayerSpec(mixer=read_attention(raw, window=raw.get("sliding_window")), mlp=moe, norm=read_norm(raw))
    return repeated(raw, layer, tensor_names=MIXTRAL_NAMES)


FAMILIES = (
    Family(
        "MixtralForCausalLM",
        "mixtral",
        read_mixtral,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
)
