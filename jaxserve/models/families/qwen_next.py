"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the others attend with a gate on what they answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_activation,
    read_attention,
    read_dense_mlp,
    read_head_dim,
    read_layer_types,
    read_norm,
    required_int,
)
from jaxserve.models.families.qwen_moe import read_shared_moe, with_experts
from jaxserve.models.rope_config import read_partial_rope
from jaxserve.models.specs import GatedDeltaNetSpec, LayerSpec, NormSpec
from jaxserve.models.tensor_names import Packed, TensorNames

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
    "full_attention_interval": 4,
}


_SHARED_EXPERT = (("mlp.shared_experts", "mlp.shared_expert"),)
_QWEN3_5_NAMES = TensorNames(
    renamed=(*_SHARED_EXPERT, *((f"linear_attn.{part}_proj", f"linear_attn.in_proj_{part}") for part in "zba")),
    packed=(Packed("linear_attn.in_proj_qkv", tuple(f"linear_attn.{part}_proj" for part in "qkv")),),
)


def read_qwen3_next(raw: Mapping[str, Any]) -> FamilyTraits:
    heads, prefix = required_int(raw, "linear_num_key_heads"), "linear_attn"
    names = TensorNames(
        renamed=_SHARED_EXPERT,
        packed=(
            Packed(f"{prefix}.in_proj_qkvz", tuple(f"{prefix}.{part}_proj" for part in "qkvz"), groups=heads),
            Packed(f"{prefix}.in_proj_ba", tuple(f"{prefix}.{part}_proj" for part in "ba"), groups=heads),
        ),
    )
    return FamilyTraits(with_experts(raw, _read_layers(raw), read_shared_moe(raw)), tensor_names=names)


def read_qwen3_5(raw: Mapping[str, Any]) -> FamilyTraits:
    """Its language model. Rotations by three positions are those by one where there are no images."""
    return FamilyTraits(_read_layers(raw), tensor_names=_QWEN3_5_NAMES)


def read_qwen3_5_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    layers = _read_layers({"intermediate_size": 1, **raw})  # all have experts
    return FamilyTraits(with_experts(raw, layers, read_shared_moe(raw)), tensor_names=_QWEN3_5_NAMES)


def _read_layers(raw: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """With dense MLPs."""
    norm, bias = dataclasses.replace(read_norm(raw), counts_from_one=True), bool(raw.get("attention_bias", False))
    rope = read_partial_rope(raw, read_head_dim(raw))
    attention = read_attention(raw, rope=rope, qk_norm=norm, gates_output=True, qkv_bias=bias, o_bias=bias)
    delta_net, kinds = _read_delta_net(raw), _layer_types(raw)
    if "full_attention" not in kinds:
        raise ValueError("layer_types must have a layer of full_attention.")
    mixers = [delta_net if kind == "linear_attention" else attention for kind in kinds]
    return tuple(LayerSpec(mixer=mixer, mlp=read_dense_mlp(raw), norm=norm) for mixer in mixers)


def _read_delta_net(raw: Mapping[str, Any]) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        num_key_heads=required_int(raw, "linear_num_key_heads"),
        num_value_heads=required_int(raw, "linear_num_value_heads"),
        key_dim=required_int(raw, "linear_key_head_dim"),
        value_dim=required_int(raw, "linear_value_head_dim"),
        conv_size=required_int(raw, "linear_conv_kernel_dim"),
        act=read_activation(raw),
        norm=NormSpec(eps=read_norm(raw).eps),
    )


def _layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    if raw.get("layer_types") is not None:
        return read_layer_types(raw, ("linear_attention", "full_attention"))
    interval = required_int(raw, "full_attention_interval")
    kinds = ("full_attention", "linear_attention")
    return tuple(kinds[(layer + 1) % interval != 0] for layer in range(required_int(raw, "num_hidden_layers")))


FAMILIES = (
    Family("Qwen3NextForCausalLM", "qwen3_next", read_qwen3_next, _DEFAULTS),
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", read_qwen3_5, _DEFAULTS),
    Family("Qwen3_5ForConditionalGeneration", "qwen3_5", read_qwen3_5, _DEFAULTS),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", read_qwen3_5_moe, _DEFAULTS),
    Family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", read_qwen3_5_moe, _DEFAULTS),
)
