"""ModernBERT: an encoder whose layers mostly see a few tokens on each side, with rotary positions and norms before both blocks.

The embedding is normed, so the first layer's attention reads it as it is.
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
    read_layer_types,
    required_int,
)
from jaxserve.models.rope_config import RopeConfig, read_rope
from jaxserve.models.specs import EmbeddingSpec, LayerSpec
from jaxserve.models.tensor_names import Packed, TensorNames

DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}
_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_NAMES = TensorNames(
    renamed=(
        ("embed_tokens", "embeddings.tok_embeddings"),
        ("embed_norm", "embeddings.norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn", "attn"),
        ("o_proj", "Wo"),
        ("post_attention_layernorm", "mlp_norm"),
        ("down_proj", "Wo"),
        ("model.norm", "model.final_norm"),
    ),
    packed=(Packed("Wqkv", ("q_proj", "k_proj", "v_proj")), Packed("Wi", ("gate_proj", "up_proj"))),
)


def read_modern_bert(raw: Mapping[str, Any]) -> FamilyTraits:
    norm = read_layer_norm(raw, "norm_eps", bias=bool(raw.get("norm_bias")))
    mlp = read_dense_mlp({**raw, "hidden_act": raw["hidden_activation"]}, bias=bool(raw.get("mlp_bias")))
    bias, window = bool(raw.get("attention_bias")), required_int(raw, "local_attention") // 2 + 1
    traits: dict[str, Any] = {"is_causal": False, "qkv_bias": bias, "o_bias": bias}

    def layer(kind: str) -> LayerSpec:
        visible = window if kind == "sliding_attention" else None
        return LayerSpec(mixer=read_attention(raw, rope=_rope(raw, kind), window=visible, **traits), mlp=mlp, norm=norm)

    layers = {kind: layer(kind) for kind in _THETAS}
    first, *others = (layers[kind] for kind in _layer_types(raw))
    first = dataclasses.replace(first, norms_mixer_input=False)
    return FamilyTraits((first, *others), embedding=EmbeddingSpec(norm=norm), tensor_names=_NAMES)


def _rope(raw: Mapping[str, Any], kind: str) -> RopeConfig:
    """Of a kind of layer: `rope_parameters` has an object for each, older files a theta for each."""
    params = {"rope_theta": raw[_THETAS[kind]], **((raw.get("rope_parameters") or {}).get(kind) or {})}
    return read_rope({**raw, "rope_parameters": params})


def _layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """layer_types, or every global_attn_every_n_layers-th layer without a window, from the first on."""
    if raw.get("layer_types") is not None:
        return read_layer_types(raw)
    num_layers, every = required_int(raw, "num_hidden_layers"), required_int(raw, "global_attn_every_n_layers")
    return tuple("sliding_attention" if layer % every else "full_attention" for layer in range(num_layers))


FAMILIES = (Family("ModernBertModel", "modernbert", read_modern_bert, DEFAULTS),)
