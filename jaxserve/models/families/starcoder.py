"""StarCoder 2: layer norms, MLPs without a gate, biases everywhere, a window on every layer if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_dense_mlp,
    read_layer_norm,
    repeated,
)
from jaxserve.models.specs import LayerSpec
from jaxserve.models.tensor_names import TensorNames

_DEFAULTS: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "tie_word_embeddings": True}
_NAMES = TensorNames((("up_proj", "c_fc"), ("down_proj", "c_proj")))


def read_starcoder2(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw["use_bias"])
    layer = LayerSpec(
        mixer=read_attention(raw, window=raw.get("sliding_window"), qkv_bias=bias, o_bias=bias),
        mlp=read_dense_mlp(raw, is_gated=False, bias=bias),
        norm=read_layer_norm(raw, "norm_epsilon", bias=True),
    )
    return repeated(raw, layer, tensor_names=_NAMES)


FAMILIES = (Family("Starcoder2ForCausalLM", "starcoder2", read_starcoder2, _DEFAULTS),)
