"""StableLM 2: layer norms, heads that are rotated in part, and both blocks side by side if the config says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_head_dim,
    read_layer_norm,
    repeated,
)
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import LayerSpec
from jaxserve.models.tensor_names import TensorNames

_DEFAULT_ROTARY_FACTOR = 0.25
_NAMES = TensorNames((("q_norm", "q_layernorm.norms"), ("k_norm", "k_layernorm.norms")))


def read_stablelm(raw: Mapping[str, Any]) -> FamilyTraits:
    mixer = read_attention(
        raw,
        rope=read_partial_rope(raw, read_head_dim(raw), _DEFAULT_ROTARY_FACTOR),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        qk_norm=read_layer_norm(raw, "layer_norm_eps") if raw.get("qk_layernorm") else None,
        qk_norm_over="each_head_apart",
    )
    norm = read_layer_norm(raw, "layer_norm_eps", bias=True)
    is_parallel = bool(raw.get("use_parallel_residual", False))
    return repeated(
        raw, LayerSpec(mixer=mixer, mlp=read_dense_mlp(raw), norm=norm, is_parallel=is_parallel), tensor_names=_NAMES
    )


FAMILIES = (Family("StableLmForCausalLM", "stablelm", read_stablelm),)
