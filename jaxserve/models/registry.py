"""The model families: what distinguishes each from the others, as one small function of config.json.

A family answers with `FamilyTraits`; everything the families share is read in `jaxserve.models.config`. Adding a family that
this decoder can compute means adding one function and one row of `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

_QWEN_DEFAULT_WINDOW = 4096
_QWEN_DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclasses.dataclass(frozen=True)
class FamilyTraits:
    """What a family decides. `windows` has one entry per layer: tokens visible including the newest, None: all."""

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None  # when config.json has none; None: hidden_size / heads


def _llama(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    return FamilyTraits(_no_windows(raw), qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def _mistral(raw: Mapping[str, Any]) -> FamilyTraits:
    return FamilyTraits((raw.get("sliding_window"),) * raw["num_hidden_layers"])


def _qwen2(raw: Mapping[str, Any]) -> FamilyTraits:
    return FamilyTraits(_qwen_windows(raw), qkv_bias=True)


def _qwen3(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    return FamilyTraits(_qwen_windows(raw), qkv_bias=bias, o_bias=bias, qk_norm=True, default_head_dim=128)


def _no_windows(raw: Mapping[str, Any]) -> tuple[None, ...]:
    return (None,) * raw["num_hidden_layers"]


def _qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's window is off unless use_sliding_window; then layer_types says where, or every layer from max_window_layers on."""
    window = raw.get("sliding_window", _QWEN_DEFAULT_WINDOW)
    if not raw.get("use_sliding_window", False) or window is None:
        return _no_windows(raw)
    num_layers = raw["num_hidden_layers"]
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", _QWEN_DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types must have num_hidden_layers={num_layers} entries, got {len(layer_types)}.")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types may hold full_attention and sliding_attention, got {kind!r}.")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


@dataclasses.dataclass(frozen=True)
class Family:
    architecture: str  # as in config.json's `architectures`
    model_type: str  # as in config.json's `model_type`, for files without `architectures`
    read: Callable[[Mapping[str, Any]], FamilyTraits]


FAMILIES = (
    Family("LlamaForCausalLM", "llama", _llama),
    Family("MistralForCausalLM", "mistral", _mistral),
    Family("Qwen2ForCausalLM", "qwen2", _qwen2),
    Family("Qwen3ForCausalLM", "qwen3", _qwen3),
)


def find_family(raw: Mapping[str, Any]) -> Family:
    """The family of a config.json object. Raises ValueError that lists the known ones."""
    architectures = raw.get("architectures") or ()
    for family in FAMILIES:
        if family.architecture in architectures or (not architectures and family.model_type == raw.get("model_type")):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    if architectures:
        raise ValueError(f"architecture {', '.join(map(repr, architectures))} is not supported; supported: {known}.")
    raise ValueError(f"model_type {raw.get('model_type')!r} (no architectures given) is not supported; supported: {known}.")
