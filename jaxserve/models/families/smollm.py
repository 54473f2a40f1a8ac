"""SmolLM 3: Llama without rotation in some layers, which alone have the window if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_layer_types,
    read_norm,
    read_rotating,
    with_mixer,
)
from jaxserve.models.rope_config import NO_ROPE
from jaxserve.models.specs import LayerSpec

_DEFAULTS: dict[str, Any] = {"rope_theta": 2_000_000.0, "num_key_value_heads": 4, "tie_word_embeddings": True}


def read_smollm3(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    rotating = LayerSpec(
        mixer=read_attention(raw, qkv_bias=bias, o_bias=bias),
        mlp=read_dense_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        norm=read_norm(raw),
    )
    rotates = read_rotating(raw)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    kinds = read_layer_types(raw) if raw.get("layer_types") is not None else None
    layers = []
    for index, is_rotating in enumerate(rotates):
        layer = rotating if is_rotating else with_mixer(rotating, rope=NO_ROPE)
        has_window = not is_rotating if kinds is None else kinds[index] == "sliding_attention"
        layers.append(with_mixer(layer, window=window) if has_window else layer)
    return FamilyTraits(tuple(layers))


FAMILIES = (Family("SmolLM3ForCausalLM", "smollm3", read_smollm3, _DEFAULTS),)
