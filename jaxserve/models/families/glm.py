"""GLM-4, in the form that Transformers has it, and GLM-4-0414, which norms the outputs of both blocks, too.

Neighbouring dimensions rotate as pairs, in the first half of each head.
"""

from __future__ import annotations

import dataclasses
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
from jaxserve.models.families.phi import FUSED_GATE_UP
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import LayerSpec
from jaxserve.models.tensor_names import TensorNames

_DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1.5625e-07}
_DEFAULT_ROTARY_FACTOR = 0.5
_NAMES = TensorNames(packed=(FUSED_GATE_UP,))
_NAMES_0414 = TensorNames(
    renamed=(
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    ),
    packed=(FUSED_GATE_UP,),
)


def read_glm(raw: Mapping[str, Any]) -> FamilyTraits:
    return FamilyTraits((_layer(raw),) * required_int(raw, "num_hidden_layers"), tensor_names=_NAMES)


def read_glm4(raw: Mapping[str, Any]) -> FamilyTraits:
    layer = dataclasses.replace(_layer(raw), norms_outputs=True)
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"), tensor_names=_NAMES_0414)


def _layer(raw: Mapping[str, Any]) -> LayerSpec:
    rope = read_partial_rope(raw, read_head_dim(raw), default=_DEFAULT_ROTARY_FACTOR)
    attention = read_attention(
        raw, rope=dataclasses.replace(rope, is_interleaved=True), qkv_bias=bool(raw.get("attention_bias"))
    )
    return LayerSpec(mixer=attention, mlp=read_dense_mlp(raw), norm=read_norm(raw))


FAMILIES = (
    Family("GlmForCausalLM", "glm", read_glm, _DEFAULTS),
    Family("Glm4ForCausalLM", "glm4", read_glm4, _DEFAULTS),
)
