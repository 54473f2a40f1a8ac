"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts, in some layers or all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Family, FamilyTraits, read_activation, required_int, with_windows
from jaxserve.models.families.qwen import DEFAULT_WINDOW, read_qwen3
from jaxserve.models.specs import LayerSpec, MoESpec, RouterSpec


def read_qwen3_moe(raw: Mapping[str, Any]) -> FamilyTraits:
    traits = read_qwen3(raw)
    moe = MoESpec(
        # Transformers writes num_local_experts since version 5, num_experts before.
        num_experts=required_int(raw, "num_experts" if raw.get("num_experts") is not None else "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "moe_intermediate_size"),
        act=read_activation(raw),
        router=RouterSpec(normalizes=bool(raw.get("norm_topk_prob", False))),
    )
    step, dense = required_int({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step"), raw.get("mlp_only_layers") or ()

    # Unlike in Qwen3, a window is that of all layers.
    window = raw.get("sliding_window", DEFAULT_WINDOW) if raw.get("use_sliding_window", False) else None

    def layer(index: int, qwen3: LayerSpec) -> LayerSpec:
        is_sparse = index not in dense and (index + 1) % step == 0
        return dataclasses.replace(qwen3, mlp=moe) if is_sparse else qwen3

    layers = with_windows(traits.layers[0], [window] * len(traits.layers))
    return dataclasses.replace(traits, layers=tuple(layer(index, spec) for index, spec in enumerate(layers)))


FAMILIES = (Family("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe),)
