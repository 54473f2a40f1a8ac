"""OLMoE."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served

_OLMOE: dict[str, Any] = {"pad_token_id": None, "intermediate_size": 24}

CASES: dict[str, Case] = {
    "olmoe": Case("Olmoe", {**_OLMOE, "num_experts": 16, "num_experts_per_tok": 6, "vocab_size": 503}),
    "olmoe-biases": Case(
        "Olmoe",
        {
            **_OLMOE,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("olmoe", page_size=16, chunk=32, tp=2, mixed=True),
]
