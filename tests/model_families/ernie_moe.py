"""Ernie 4.5's mixtures of experts."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served

_EXPERTS: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "pad_token_id": None}

CASES: dict[str, Case] = {
    "ernie-moe": Case("Ernie4_5_Moe", {**_EXPERTS, "num_hidden_layers": 3, "vocab_size": 503}),
    "ernie-moe-some-layers": Case(
        "Ernie4_5_Moe",
        {
            **_EXPERTS,
            "moe_num_experts": 12,
            "moe_num_shared_experts": 0,
            "num_hidden_layers": 6,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 4,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("ernie-moe", page_size=64, chunk=64, tp=2, overlap=False),
]
