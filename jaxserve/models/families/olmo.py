"""OLMo 2 and OLMo 3: Llama with norms behind both blocks, not before them, and over all heads of queries or keys together.

OLMo 3 has windows on most layers, and stretches positions in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_norm,
    read_sliding,
    repeated,
    with_mixer,
)
from jaxserve.models.rope_config import RopeConfig, read_rope
from jaxserve.models.specs import LayerSpec

_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
_DEFAULTS_3: dict[str, Any] = {**_DEFAULTS, "sliding_window": 4096}
_PATTERN = 4  # every fourth layer has no window


def read_olmo2(raw: Mapping[str, Any]) -> FamilyTraits:
    return repeated(raw, _layer(raw, read_rope(raw)))


def read_olmo3(raw: Mapping[str, Any]) -> FamilyTraits:
    full, local = _layer(raw, _rope(raw, "full_attention")), _layer(raw, _rope(raw, "sliding_attention"))
    local = with_mixer(local, window=raw["sliding_window"])
    return FamilyTraits(tuple(local if is_sliding else full for is_sliding in read_sliding(raw, _PATTERN)))


def _layer(raw: Mapping[str, Any], rope: RopeConfig) -> LayerSpec:
    norm, bias = read_norm(raw), bool(raw.get("attention_bias", False))
    mixer = read_attention(raw, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=norm, qk_norm_over="all_heads")
    return LayerSpec(mixer=mixer, mlp=read_dense_mlp(raw), norm=norm, norms_inputs=False, norms_outputs=True)


def _rope(raw: Mapping[str, Any], kind: str) -> RopeConfig:
    """Of a kind of layer: `rope_parameters` has an object for each, or what stands flat is that of full_attention."""
    params = raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in params.values()):
        return read_rope({**raw, "rope_parameters": params.get(kind) or {}})
    theta = params.get("rope_theta") or raw["rope_theta"]
    return read_rope(raw) if kind == "full_attention" else RopeConfig(theta=float(theta))


FAMILIES = (
    Family("Olmo2ForCausalLM", "olmo2", read_olmo2, _DEFAULTS),
    Family("Olmo3ForCausalLM", "olmo3", read_olmo3, _DEFAULTS_3),
)
