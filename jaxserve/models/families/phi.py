"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and perhaps a window or heads that are rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_head_dim,
    read_norm,
    required_int,
)
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import LayerSpec
from jaxserve.models.tensor_names import Packed, TensorNames

FUSED_GATE_UP = Packed("gate_up_proj", ("gate_proj", "up_proj"))
_NAMES = TensorNames(packed=(Packed("qkv_proj", ("q_proj", "k_proj", "v_proj")), FUSED_GATE_UP))


def read_phi3(raw: Mapping[str, Any]) -> FamilyTraits:
    if raw.get("attention_bias"):
        raise ValueError("attention_bias must be false: Phi-3 has no biases.")
    layer = LayerSpec(
        mixer=read_attention(raw, rope=read_partial_rope(raw, read_head_dim(raw)), window=raw.get("sliding_window")),
        mlp=read_dense_mlp(raw),
        norm=read_norm(raw),
    )
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"), tensor_names=_NAMES)


FAMILIES = (Family("Phi3ForCausalLM", "phi3", read_phi3, {"rms_norm_eps": 1e-5}),)
