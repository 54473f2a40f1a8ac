"""Granite 4: most layers are Mamba 2, some attend, often without rotation; an MLP that all tokens go through, alone or beside
experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.bamba import MAMBA_DEFAULTS, read_mamba2
from jaxserve.models.families.common import Family, FamilyTraits, read_activation, read_layer_types, required_int, with_mixer
from jaxserve.models.families.granite import read_granite
from jaxserve.models.families.granite_moe import GRANITE_EXPERTS, read_granite_experts
from jaxserve.models.rope_config import NO_ROPE
from jaxserve.models.specs import DenseMLPSpec
from jaxserve.models.tensor_names import Packed, TensorNames

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # as published files call them
_MLP, _SHARED = "mlp", "mlp.shared_experts"


def read_granite_hybrid(raw: Mapping[str, Any]) -> FamilyTraits:
    dense = DenseMLPSpec(intermediate_size=required_int(raw, "shared_intermediate_size"), act=read_activation(raw))
    has_experts = bool(raw.get("num_local_experts"))
    mlp = dataclasses.replace(read_granite_experts(raw), shared=dense) if has_experts else dense
    given = raw.get("layer_types") or ["linear_attention"] * required_int(raw, "num_hidden_layers")
    kinds = read_layer_types({**raw, "layer_types": [_KINDS.get(kind, kind) for kind in given]}, tuple(_KINDS.values()))
    if "full_attention" not in kinds:
        raise ValueError("layer_types must have a layer of full_attention.")
    granite = read_granite({**raw, "intermediate_size": dense.intermediate_size})
    attending = granite.layers[0]
    if raw.get("position_embedding_type") != "rope":
        attending = with_mixer(attending, rope=NO_ROPE)
    mixers = {"full_attention": attending.mixer, "linear_attention": read_mamba2(raw)}
    layers = tuple(dataclasses.replace(attending, mixer=mixers[kind], mlp=mlp) for kind in kinds)
    return dataclasses.replace(granite, layers=layers, tensor_names=_names(_SHARED if has_experts else _MLP, has_experts))


def _names(dense: str, has_experts: bool) -> TensorNames:
    packed = Packed("shared_mlp.input_linear", (f"{dense}.gate_proj", f"{dense}.up_proj"))
    renamed = (f"{dense}.down_proj", "shared_mlp.output_linear")
    return TensorNames(
        renamed=(renamed, *(GRANITE_EXPERTS if has_experts else ())), packed=(packed,), experts_in_one=has_experts
    )


FAMILIES = (
    Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        read_granite_hybrid,
        {**MAMBA_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    ),
)
