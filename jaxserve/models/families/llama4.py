"""Llama 4's language model: most layers attend within chunks of positions, the others to all without rotation; some or all MLPs
are mixtures whose one expert reads the token times its score."""

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
    read_layer_types,
    read_norm,
    read_rotating,
    required_int,
)
from jaxserve.models.rope_config import NO_ROPE, read_rope
from jaxserve.models.specs import (
    DenseMLPSpec,
    LayerSpec,
    MoESpec,
    RouterSpec,
    TemperatureTuning,
)
from jaxserve.models.tensor_names import TensorNames

LLAMA4_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


_NAMES = TensorNames(
    (("mlp", "feed_forward"), ("mlp.gate", "feed_forward.router"), ("mlp.shared_experts", "feed_forward.shared_expert")),
    experts_in_first=True,
)


def read_llama4(raw: Mapping[str, Any]) -> FamilyTraits:
    rotates = read_rotating(raw)
    layers = zip(rotates, _is_chunked(raw, rotates), _is_sparse(raw), strict=True)
    return FamilyTraits(tuple(_layer(raw, *kind) for kind in layers), tensor_names=_NAMES)


def _layer(raw: Mapping[str, Any], rotates: bool, is_chunked: bool, is_sparse: bool) -> LayerSpec:
    bias = bool(raw.get("attention_bias", False))
    tuning = TemperatureTuning(floor_scale=float(raw["floor_scale"]), strength=float(raw["attn_scale"]))
    attention = read_attention(
        raw,
        rope=dataclasses.replace(read_rope(raw), is_interleaved=True) if rotates else NO_ROPE,
        window=raw["attention_chunk_size"] if is_chunked else None,
        is_chunked=is_chunked,
        # Behind the rotation, which leaves a head's length as it is.
        qk_norm=dataclasses.replace(read_norm(raw), has_weight=False) if rotates and raw["use_qk_norm"] else None,
        tuning=tuning if raw["attn_temperature_tuning"] and not rotates else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    dense = DenseMLPSpec(intermediate_size=required_int(raw, "intermediate_size_mlp"), act=read_activation(raw))
    return LayerSpec(mixer=attention, mlp=_moe(raw) if is_sparse else dense, norm=read_norm(raw))


def _moe(raw: Mapping[str, Any]) -> MoESpec:
    return MoESpec(
        num_experts=required_int(raw, "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(scoring="sigmoid"),
        shared=read_dense_mlp(raw),
        weighs_inputs=True,
    )


def _is_chunked(raw: Mapping[str, Any], rotates: tuple[bool, ...]) -> tuple[bool, ...]:
    if raw["attention_chunk_size"] is None:
        return (False,) * len(rotates)
    if raw.get("layer_types") is None:
        return rotates
    return tuple(kind == "chunked_attention" for kind in read_layer_types(raw, ("full_attention", "chunked_attention")))


def _is_sparse(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    num_layers, step = required_int(raw, "num_hidden_layers"), required_int(raw, "interleave_moe_layer_step")
    sparse = raw.get("moe_layers")
    return tuple((layer in sparse) if sparse is not None else (layer + 1) % step == 0 for layer in range(num_layers))


FAMILIES = (
    Family("Llama4ForCausalLM", "llama4_text", read_llama4, LLAMA4_DEFAULTS),
    Family("Llama4ForConditionalGeneration", "llama4", read_llama4, LLAMA4_DEFAULTS),  # its text part
)
