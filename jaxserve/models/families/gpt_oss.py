"""gpt-oss: windows on every other layer, sinks, biases everywhere, and mixtures whose experts clamp what they multiply.

Published checkpoints have the experts in mxfp4 (`stored_formats`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_attention,
    read_norm,
    read_sliding,
    required_int,
    with_mixer,
)
from jaxserve.models.specs import ClampedSwiglu, LayerSpec, MoESpec, RouterSpec
from jaxserve.models.tensor_names import TensorNames

_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
_NAMES = TensorNames((("mlp.gate", "mlp.router"),), experts_in_first=True, experts_alternate=True)
_PATTERN = 2  # every other layer has no window


def read_gpt_oss(raw: Mapping[str, Any]) -> FamilyTraits:
    bias = bool(raw["attention_bias"])
    moe = MoESpec(
        num_experts=required_int(raw, "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=required_int(raw, "intermediate_size"),
        swiglu=ClampedSwiglu(alpha=float(raw["swiglu_alpha"]), limit=float(raw["swiglu_limit"])),
        bias=True,
        router=RouterSpec(normalizes=True, bias=True),
    )
    full = LayerSpec(mixer=read_attention(raw, qkv_bias=bias, o_bias=bias, sinks=True), mlp=moe, norm=read_norm(raw))
    local = with_mixer(full, window=raw["sliding_window"])
    layers = tuple(local if is_sliding else full for is_sliding in read_sliding(raw, _PATTERN))
    return FamilyTraits(layers, tensor_names=_NAMES)


FAMILIES = (Family("GptOssForCausalLM", "gpt_oss", read_gpt_oss, _DEFAULTS),)
