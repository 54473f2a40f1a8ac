"""GLM-4.5."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served, rope

_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "num_hidden_layers": 3,
}


def _with_further_tokens(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Published files have a layer behind the last, which predicts a further token."""
    last = raw["num_hidden_layers"]
    prefix = f"model.layers.{last - 1}."
    further = {
        f"model.layers.{last}.{name.removeprefix(prefix)}": tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    further[f"model.layers.{last}.eh_proj.weight"] = tensors["lm_head.weight"].clone()
    return {**raw, "num_nextn_predict_layers": 1}, {**tensors, **further}


CASES: dict[str, Case] = {
    "glm4-moe": Case(
        "Glm4Moe",
        {**_EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True},
        rewrite=_with_further_tokens,
    ),
    "glm4-moe-one-group": Case(
        "Glm4Moe",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": rope("default", partial_rotary_factor=0.75),
            "num_key_value_heads": 4,
            "vocab_size": 503,
        },
    ),
}
LIVE = [
    Served("glm4-moe", page_size=16, chunk=32, tp=2, mixed=True, drafts=True),
]
IN_PROCESS = [
    Served("glm4-moe-one-group", page_size=1, chunk=48, overlap=False, in_matrix=True),
]
