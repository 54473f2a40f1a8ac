"""GraniteMoe: Granite whose MLPs are mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_activation, required_int
from jaxserve.models.families.granite import read_granite
from jaxserve.models.specs import MoESpec, RouterSpec
from jaxserve.models.tensor_names import TensorNames

GRANITE_EXPERTS = (  # as files call them
    ("mlp.gate", "block_sparse_moe.router.layer"),
    ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
)
_NAMES = TensorNames(renamed=GRANITE_EXPERTS, experts_in_one=True)


def read_granite_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    moe, granite = read_granite_experts(raw), read_granite(raw)
    layers = tuple(dataclasses.replace(layer, mlp=moe) for layer in granite.layers)
    return dataclasses.replace(granite, layers=layers, tensor_names=_NAMES)


def read_granite_experts(raw: Mapping[str, Any]) -> MoESpec:
    return MoESpec(
        num_experts=required_int(raw, "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(normalizes=True),
    )


FAMILIES = (
    Family("GraniteMoeForCausalLM", "granitemoe", read_granite_moe, {"num_local_experts": 8, "num_experts_per_tok": 2}),
)
