"""Llama, and Mistral, which is Llama with a window on every layer and without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_attention, read_dense_mlp, read_norm, required_int
from jaxserve.models.specs import LayerSpec


def read_llama(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw.get("attention_bias", False))
    layer = LayerSpec(
        mixer=read_attention(raw, qkv_bias=bias, o_bias=bias),
        mlp=read_dense_mlp(raw, bias=bool(raw.get("mlp_bias", False))),
        norm=read_norm(raw),
    )
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"))


def read_mistral(raw: Mapping[str, Any]) -> FamilyTraits:
    attention = read_attention(raw, window=raw.get("sliding_window"))
    layer = LayerSpec(mixer=attention, mlp=read_dense_mlp(raw), norm=read_norm(raw))
    return FamilyTraits((layer,) * required_int(raw, "num_hidden_layers"))


FAMILIES = (
    Family("LlamaForCausalLM", "llama", read_llama),
    Family("MistralForCausalLM", "mistral", read_mistral),
)
