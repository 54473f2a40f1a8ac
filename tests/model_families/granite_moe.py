"""GraniteMoe."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served

_SCALES: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}

CASES: dict[str, Case] = {
    "granite-moe": Case("GraniteMoe", {**_SCALES, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "granite-moe-biases": Case(
        "GraniteMoe",
        {
            **_SCALES,
            "num_local_experts": 4,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 503,
        },
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("granite-moe", page_size=16, chunk=48, tp=4, mixed=True),
]
