"""Granite: Llama with factors on embeddings, scores, what blocks add, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_attention, read_dense_mlp, read_norm, repeated
from jaxserve.models.specs import LayerSpec


def read_granite(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    layer = LayerSpec(
        mixer=read_attention(raw, scale=_factor(raw, "attention_multiplier"), qkv_bias=bias, o_bias=bias),
        mlp=read_dense_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        norm=read_norm(raw),
        residual_scale=_factor(raw, "residual_multiplier"),
    )
    embedding_scale, logit_scale = _factor(raw, "embedding_multiplier"), 1 / _factor(raw, "logits_scaling")
    return repeated(raw, layer, embedding_scale=embedding_scale, logit_scale=logit_scale)


def _factor(raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name, 1.0)
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name} must be a number above 0, got {value!r}.")
    return float(value)


FAMILIES = (Family("GraniteForCausalLM", "granite", read_granite),)
