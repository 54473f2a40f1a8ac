"""Qwen2 and Qwen3: the second trades biases of q, k and v for norms of q and k.

MiMo is Qwen2 with layers that guess tokens ahead, whose tensors are passed over.
"""

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
    required_int,
    with_windows,
)
from jaxserve.models.specs import LayerSpec

_DEFAULT_HEAD_DIM = 128  # Qwen3
DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_qwen2(raw: Mapping[str, Any]) -> FamilyTraits:
    layer = LayerSpec(mixer=read_attention(raw, qkv_bias=True), mlp=read_dense_mlp(raw), norm=read_norm(raw))
    return FamilyTraits(with_windows(layer, qwen_windows(raw)))


def read_qwen3(raw: Mapping[str, Any]) -> FamilyTraits:
    norm, bias = read_norm(raw), bool(raw.get("attention_bias", False))
    attention = read_attention(raw, default_head_dim=_DEFAULT_HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=norm)
    layer = LayerSpec(mixer=attention, mlp=read_dense_mlp(raw), norm=norm)
    return FamilyTraits(with_windows(layer, qwen_windows(raw)))


def qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer. The window is off unless use_sliding_window; then layer_types says where, or from max_window_layers on."""
    num_layers = required_int(raw, "num_hidden_layers")
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    if not raw.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    if raw.get("layer_types") is None:
        first = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in read_layer_types(raw))


FAMILIES = (
    Family("Qwen2ForCausalLM", "qwen2", read_qwen2),
    Family("MiMoForCausalLM", "mimo", read_qwen2),
    Family("Qwen3ForCausalLM", "qwen3", read_qwen3),
)
