"""Ernie 4.5's mixtures of experts, whose choice a learned correction shifts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_activation, required_int
from jaxserve.models.families.ernie import ERNIE_DEFAULTS, ernie_layer
from jaxserve.models.specs import DenseMLPSpec, MoESpec, RouterSpec
from jaxserve.models.tensor_names import TensorNames

_DEFAULTS: dict[str, Any] = {
    **ERNIE_DEFAULTS,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
_CORRECTION = "mlp.gate.e_score_correction_bias"
_NAMES = TensorNames(renamed=((_CORRECTION, "mlp.moe_statics.e_score_correction_bias"),), in_one_row=(_CORRECTION,))


def read_ernie_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    if raw.get("use_bias"):
        raise ValueError("use_bias must be false: Ernie's experts have no biases.")
    dense = ernie_layer(raw)
    sparse = dataclasses.replace(dense, mlp=_moe(raw))
    return FamilyTraits(tuple(sparse if is_sparse else dense for is_sparse in _is_sparse(raw)), tensor_names=_NAMES)


def _is_sparse(raw: Mapping[str, Any]) -> list[bool]:
    num_layers, step = required_int(raw, "num_hidden_layers"), required_int(raw, "moe_layer_interval")
    first, last = int(raw["moe_layer_start_index"]), int(raw["moe_layer_end_index"])
    last = num_layers - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % step == 0 for layer in range(num_layers)]


def _moe(raw: Mapping[str, Any]) -> MoESpec:
    size, act, num_shared = required_int(raw, "moe_intermediate_size"), read_activation(raw), raw["moe_num_shared_experts"]
    return MoESpec(
        num_experts=required_int(raw, "moe_num_experts"),
        experts_per_token=required_int(raw, "moe_k"),
        intermediate_size=size,
        act=act,
        router=RouterSpec(corrects_choice=True, normalizes=True, least_sum=float(raw["moe_norm_min"]), in_float32=True),
        shared=DenseMLPSpec(intermediate_size=size * num_shared, act=act) if num_shared else None,
    )


FAMILIES = (Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", read_ernie_moe, _DEFAULTS),)
