"""Command R (Cohere) and Command R7B and A (Cohere 2): both blocks side by side behind one layer norm without bias.

Neighbouring dimensions rotate as pairs. Cohere 2 has windows on most layers, and no positions at all in the others.
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
    read_layer_norm,
    read_sliding,
    repeated,
    with_mixer,
)
from jaxserve.models.rope_config import NO_ROPE, read_rope
from jaxserve.models.specs import LayerSpec

_DEFAULTS: dict[str, Any] = {"logit_scale": 0.0625, "tie_word_embeddings": True}
_DEFAULTS_COHERE: dict[str, Any] = {**_DEFAULTS, "rope_theta": 500_000.0}
_DEFAULTS_COHERE2: dict[str, Any] = {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}


def read_cohere(raw: Mapping[str, Any]) -> FamilyTraits:
    norm = read_layer_norm(raw, "layer_norm_eps") if raw.get("use_qk_norm") else None
    return repeated(raw, _layer(raw, qk_norm=norm, qk_norm_over="each_head"), logit_scale=float(raw["logit_scale"]))


def read_cohere2(raw: Mapping[str, Any]) -> FamilyTraits:
    local = _layer(raw, window=raw["sliding_window"])
    full = with_mixer(local, window=None, rope=NO_ROPE)
    layers = tuple(local if is_sliding else full for is_sliding in read_sliding(raw, raw["sliding_window_pattern"]))
    return FamilyTraits(layers, logit_scale=float(raw["logit_scale"]))


def _layer(raw: Mapping[str, Any], **traits: Any) -> LayerSpec:
    bias = bool(raw.get("attention_bias", False))
    rope = dataclasses.replace(read_rope(raw), is_interleaved=True)
    mixer = read_attention(raw, rope=rope, qkv_bias=bias, o_bias=bias, **traits)
    return LayerSpec(mixer=mixer, mlp=read_dense_mlp(raw), norm=read_layer_norm(raw, "layer_norm_eps"), is_parallel=True)


FAMILIES = (
    Family("CohereForCausalLM", "cohere", read_cohere, _DEFAULTS_COHERE),
    Family("Cohere2ForCausalLM", "cohere2", read_cohere2, _DEFAULTS_COHERE2),
)
