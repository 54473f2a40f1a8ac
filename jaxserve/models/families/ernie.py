"""Ernie 4.5: Llama whose neighbouring dimensions rotate as pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_attention, read_dense_mlp, read_norm, repeated
from jaxserve.models.rope_config import read_rope
from jaxserve.models.specs import LayerSpec

ERNIE_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
_DEFAULT_HEAD_DIM = 128


def read_ernie(raw: Mapping[str, Any]) -> FamilyTraits:
    return repeated(raw, ernie_layer(raw, default_head_dim=_DEFAULT_HEAD_DIM))


def ernie_layer(raw: Mapping[str, Any], *, default_head_dim: int | None = None) -> LayerSpec:
    bias = bool(raw.get("use_bias", False))
    rope = dataclasses.replace(read_rope(raw), is_interleaved=True)
    mixer = read_attention(raw, default_head_dim=default_head_dim, rope=rope, qkv_bias=bias, o_bias=bias)
    return LayerSpec(mixer=mixer, mlp=read_dense_mlp(raw, bias=bias), norm=read_norm(raw))


FAMILIES = (Family("Ernie4_5ForCausalLM", "ernie4_5", read_ernie, ERNIE_DEFAULTS),)
