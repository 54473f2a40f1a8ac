"""Seed-OSS: Llama with biases where its config says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_attention, read_dense_mlp, read_norm, repeated
from jaxserve.models.specs import LayerSpec

_DEFAULT_HEAD_DIM = 128


def read_seed_oss(raw: Mapping[str, Any]) -> FamilyTraits:
    mixer = read_attention(
        raw,
        default_head_dim=_DEFAULT_HEAD_DIM,
        qkv_bias=bool(raw.get("attention_bias", True)),
        o_bias=bool(raw.get("attention_out_bias", False)),
    )
    mlp = read_dense_mlp(raw, bias=bool(raw.get("mlp_bias", False)))
    return repeated(raw, LayerSpec(mixer=mixer, mlp=mlp, norm=read_norm(raw)))


FAMILIES = (Family("SeedOssForCausalLM", "seed_oss", read_seed_oss),)
