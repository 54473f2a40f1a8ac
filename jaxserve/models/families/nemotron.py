"""Nemotron and Minitron: layer norms whose weights count from 1, MLPs without a gate, heads that are rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_head_dim,
    read_layer_norm,
    repeated,
)
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import LayerSpec

_DEFAULTS: dict[str, Any] = {"hidden_act": "relu2"}
_DEFAULT_ROTARY_FACTOR = 0.5


def read_nemotron(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    rope = read_partial_rope(raw, read_head_dim(raw), _DEFAULT_ROTARY_FACTOR)
    layer = LayerSpec(
        mixer=read_attention(raw, rope=rope, qkv_bias=bias, o_bias=bias),
        mlp=read_dense_mlp(raw, is_gated=False, bias=bool(raw.get("mlp_bias", False))),
        norm=read_layer_norm(raw, "norm_eps", bias=True, counts_from_one=True),
    )
    return repeated(raw, layer)


FAMILIES = (Family("NemotronForCausalLM", "nemotron", read_nemotron, _DEFAULTS),)
