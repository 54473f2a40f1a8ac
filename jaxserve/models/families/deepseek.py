"""DeepSeek V2, V3 and R1, and Kimi K2, which is of V3's shape: latent attention, and mixtures with shared experts behind a few
dense layers.

V2 chooses experts by a softmax, V3 by sigmoids with a learned correction, from groups of experts. The layers that V3 has for
guessing tokens ahead are passed over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import (
    Family,
    FamilyTraits,
    read_activation,
    read_dense_mlp,
    read_norm,
    required_int,
)
from jaxserve.models.rope_config import RopeConfig, read_rope
from jaxserve.models.specs import DenseMLPSpec, LatentAttentionSpec, LayerSpec, MoESpec, RouterSpec

_DEFAULTS: dict[str, Any] = {"first_k_dense_replace": 0, "moe_layer_freq": 1, "routed_scaling_factor": 1.0}
_V2_DEFAULTS: dict[str, Any] = {**_DEFAULTS, "topk_method": "greedy", "scoring_func": "softmax"}
_V3_DEFAULTS: dict[str, Any] = {**_DEFAULTS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_LEAST_SUM = 1e-20  # of the chosen experts' scores


def read_v2(raw: Mapping[str, Any]) -> FamilyTraits:
    if raw.get("norm_topk_prob"):
        raise ValueError("norm_topk_prob must be false for DeepSeek V2: its experts' weights are only scaled.")
    _check(raw, "topk_method", "greedy", "group_limited_greedy")
    _check(raw, "scoring_func", "softmax")
    limits: dict[str, Any] = {}
    if raw["topk_method"] == "group_limited_greedy":
        limits = {"num_groups": required_int(raw, "n_group"), "chosen_groups": required_int(raw, "topk_group")}
    router = RouterSpec(scaling=float(raw["routed_scaling_factor"]), in_float32=True)
    return _read(raw, dataclasses.replace(router, **limits))


def read_v3(raw: Mapping[str, Any]) -> FamilyTraits:
    _check(raw, "topk_method", "noaux_tc")
    _check(raw, "scoring_func", "sigmoid")
    router = RouterSpec(
        scoring="sigmoid",
        normalizes=bool(raw.get("norm_topk_prob", True)),
        least_sum=_LEAST_SUM,
        scaling=float(raw["routed_scaling_factor"]),
        corrects_choice=True,
        num_groups=required_int({"n_group": 1, **raw}, "n_group"),
        chosen_groups=required_int({"topk_group": 1, **raw}, "topk_group"),
        group_score="top2",
        in_float32=True,
    )
    return _read(raw, router)


def _read(raw: Mapping[str, Any], router: RouterSpec) -> FamilyTraits:
    if raw.get("attention_bias"):
        raise ValueError("attention_bias must be false: latent attention has no biases.")
    dense = LayerSpec(mixer=_attention(raw), mlp=read_dense_mlp(raw), norm=read_norm(raw))
    sparse = dataclasses.replace(dense, mlp=_moe(raw, router))
    first, step = raw["first_k_dense_replace"], required_int(raw, "moe_layer_freq")
    if not isinstance(first, int) or first < 0:
        raise ValueError(f"first_k_dense_replace must be a whole number of at least 0, got {first!r}.")
    num_layers = required_int(raw, "num_hidden_layers")
    return FamilyTraits(tuple(sparse if i >= first and i % step == 0 else dense for i in range(num_layers)))


def _moe(raw: Mapping[str, Any], router: RouterSpec) -> MoESpec:
    size, act = required_int(raw, "moe_intermediate_size"), read_activation(raw)
    shared = required_int(raw, "n_shared_experts") if raw.get("n_shared_experts") else 0
    return MoESpec(
        # Transformers writes num_local_experts since version 5.
        num_experts=required_int(raw, "n_routed_experts" if raw.get("n_routed_experts") is not None else "num_local_experts"),
        experts_per_token=required_int(raw, "num_experts_per_tok"),
        intermediate_size=size,
        act=act,
        router=router,
        shared=DenseMLPSpec(intermediate_size=size * shared, act=act) if shared else None,
    )


def _attention(raw: Mapping[str, Any]) -> LatentAttentionSpec:
    nope_dim, rope_dim = required_int(raw, "qk_nope_head_dim"), required_int(raw, "qk_rope_head_dim")
    rope = read_rope(raw)
    return LatentAttentionSpec(
        num_heads=required_int(raw, "num_attention_heads"),
        q_lora_rank=required_int(raw, "q_lora_rank") if raw.get("q_lora_rank") is not None else None,
        kv_lora_rank=required_int(raw, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=required_int(raw, "v_head_dim"),
        scale=float((nope_dim + rope_dim) ** -0.5) * _score_factor(rope),
        rope=dataclasses.replace(rope, is_interleaved=bool(raw.get("rope_interleave", True))),
    )


def _score_factor(rope: RopeConfig) -> float:
    """YaRN's, of queries and keys alike, whose part that is not rotated has it from here."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return float((0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2)


def _check(raw: Mapping[str, Any], name: str, *known: str) -> None:
    if raw[name] not in known:
        raise ValueError(f"{name} must be {' or '.join(known)} for this model family, got {raw[name]!r}.")


FAMILIES = (
    Family("DeepseekV2ForCausalLM", "deepseek_v2", read_v2, _V2_DEFAULTS),
    Family("DeepseekV3ForCausalLM", "deepseek_v3", read_v3, _V3_DEFAULTS),
    Family("KimiK2ForCausalLM", "kimi_k2", read_v3, _V3_DEFAULTS),
)
