"""Gemma 2 and Gemma 3: norms before and behind both blocks, windows on most layers, a scaled embedding that is also the head.

Gemma 2 caps scores and logits. Gemma 3 norms queries and keys instead, and layers with a window rotate slower than the others,
which may be stretched. EmbeddingGemma is a Gemma 3 whose attention is not causal. Published files leave out what Transformers
has a default for: those defaults stand here.
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
    read_norm,
    read_sliding,
    required_int,
)
from jaxserve.models.rope_config import RopeConfig, read_rope
from jaxserve.models.specs import LayerSpec, NormSpec

_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window_pattern": 2,
}
GEMMA3_DEFAULTS: dict[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # of Gemma 3, where its file names none


def read_gemma2(raw: Mapping[str, Any]) -> FamilyTraits:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention must be false for Gemma 2.")
    return _read(raw, dict.fromkeys(("full_attention", "sliding_attention"), read_rope(raw)), qk_norm=None)


def read_gemma3(raw: Mapping[str, Any]) -> FamilyTraits:
    return _read(raw, _gemma3_ropes(raw), qk_norm=_norm(raw))


def _gemma3_ropes(raw: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """Per type of layer: `rope_parameters` has an object for each, or what stands flat is that of full_attention."""
    params = raw.get("rope_parameters") or {}
    flat = {name: value for name, value in params.items() if value is not None and not isinstance(value, Mapping)}
    full = {"rope_theta": raw.get("rope_theta") or _GLOBAL_THETA, **(params.get("full_attention") or {}), **flat}
    local = {"rope_theta": raw.get("rope_local_base_freq") or _LOCAL_THETA, **(params.get("sliding_attention") or {})}
    return {
        "full_attention": dataclasses.replace(read_rope({**raw, "rope_parameters": full}), max_len_is_scaled=True),
        "sliding_attention": read_rope({**raw, "rope_parameters": local, "rope_scaling": None}),
    }


def _read(raw: Mapping[str, Any], ropes: Mapping[str, RopeConfig], qk_norm: NormSpec | None) -> FamilyTraits:
    layers = {kind: _layer(raw, rope, qk_norm, is_local=kind == "sliding_attention") for kind, rope in ropes.items()}
    return FamilyTraits(
        tuple(layers[kind] for kind in _layer_types(raw)),
        embedding_scale=float(required_int(raw, "hidden_size") ** 0.5),
        logit_soft_cap=_soft_cap(raw, "final_logit_softcapping"),
    )


def _layer(raw: Mapping[str, Any], rope: RopeConfig, qk_norm: NormSpec | None, *, is_local: bool) -> LayerSpec:
    bias, is_causal = bool(raw.get("attention_bias", False)), not raw.get("use_bidirectional_attention")
    window = raw.get("sliding_window") if is_local else None
    if window is not None and not is_causal:
        window = window // 2 + 1  # half of it on each side
    attention = read_attention(
        raw,
        rope=rope,
        scale=float(required_int(raw, "query_pre_attn_scalar") ** -0.5),
        is_causal=is_causal,
        window=window,
        soft_cap=_soft_cap(raw, "attn_logit_softcapping"),
        qk_norm=qk_norm,
        qkv_bias=bias,
        o_bias=bias,
    )
    mlp = read_dense_mlp({**raw, "hidden_act": raw["hidden_activation"]})
    return LayerSpec(mixer=attention, mlp=mlp, norm=_norm(raw), norms_outputs=True)


def _norm(raw: Mapping[str, Any]) -> NormSpec:
    return dataclasses.replace(read_norm(raw), counts_from_one=True)


def _soft_cap(raw: Mapping[str, Any], name: str) -> float | None:
    cap = raw.get(name)
    if cap is None:
        return None
    if not isinstance(cap, int | float) or cap <= 0:
        raise ValueError(f"{name} must be a number above 0, got {cap!r}.")
    return float(cap)


def _layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """layer_types, or every sliding_window_pattern-th layer without a window."""
    is_sliding = read_sliding(raw, required_int(raw, "sliding_window_pattern"))
    return tuple("sliding_attention" if slides else "full_attention" for slides in is_sliding)


FAMILIES = (
    Family("Gemma2ForCausalLM", "gemma2", read_gemma2, GEMMA2_DEFAULTS),
    Family("Gemma3ForCausalLM", "gemma3_text", read_gemma3, GEMMA3_DEFAULTS),
    Family("Gemma3ForConditionalGeneration", "gemma3", read_gemma3, GEMMA3_DEFAULTS),  # its text part
)
