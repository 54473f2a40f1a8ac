"""Qwen2-MoE and Qwen3-MoE: Qwen whose MLPs are mixtures of experts, in some layers or all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    first_int,
    read_activation,
    read_attention,
    read_dense_mlp,
    read_norm,
    required_int,
    with_windows,
)
from jaxserve.models.families.qwen import DEFAULT_WINDOW, qwen_windows, read_qwen3
from jaxserve.models.specs import DenseMLPSpec, LayerSpec, MoESpec, RouterSpec
from jaxserve.models.tensor_names import TensorNames

_QWEN2_NAMES = TensorNames(renamed=(("mlp.shared_experts", "mlp.shared_expert"),))
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_qwen2_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    """All tokens go through a shared expert, too, whose answer a gate of one weighs."""
    attention = read_attention(raw, qkv_bias=bool(raw.get("qkv_bias", True)))
    layer = LayerSpec(mixer=attention, mlp=read_dense_mlp(raw), norm=read_norm(raw))
    layers = with_windows(layer, qwen_windows({**raw, "layer_types": raw.get("layer_types") or _qwen2_layer_types(raw)}))
    return FamilyTraits(with_experts(raw, layers, read_shared_moe(raw)), tensor_names=_QWEN2_NAMES)


def read_qwen3_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    traits = read_qwen3(raw)
    # Unlike in Qwen3, a window is that of all layers.
    window = raw.get("sliding_window", DEFAULT_WINDOW) if raw.get("use_sliding_window", False) else None
    layers = with_windows(traits.layers[0], [window] * len(traits.layers))
    return dataclasses.replace(traits, layers=with_experts(raw, layers, _read_moe(raw)))


def read_shared_moe(raw: Mapping[str, Any]) -> MoESpec:
    """With a shared expert, whose answer is gated."""
    shared = DenseMLPSpec(intermediate_size=required_int(raw, "shared_expert_intermediate_size"), act=read_activation(raw))
    return dataclasses.replace(_read_moe(raw), shared=shared, gates_shared=True)


def _read_moe(raw: Mapping[str, Any]) -> MoESpec:
    return MoESpec(
        # Transformers writes num_local_experts since version 5, num_experts before.
        num_experts=first_int(raw, "num_experts", "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "moe_intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(normalizes=bool(raw.get("norm_topk_prob", False))),
    )


def with_experts(raw: Mapping[str, Any], layers: tuple[LayerSpec, ...], moe: MoESpec) -> tuple[LayerSpec, ...]:
    """In the place of some layers' MLPs."""
    step, dense = required_int({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step"), raw.get("mlp_only_layers") or ()

    def layer(index: int, plain: LayerSpec) -> LayerSpec:
        is_sparse = index not in dense and (index + 1) % step == 0
        return dataclasses.replace(plain, mlp=moe) if is_sparse else plain

    return tuple(layer(index, spec) for index, spec in enumerate(layers))


def _qwen2_layer_types(raw: Mapping[str, Any]) -> list[str]:
    """Every second layer has the window, from the first on."""
    last = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    has_window = [layer % 2 == 0 and layer < last for layer in range(required_int(raw, "num_hidden_layers"))]
    return ["sliding_attention" if windowed else "full_attention" for windowed in has_window]


FAMILIES = (
    Family("Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_moe),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe),
)
