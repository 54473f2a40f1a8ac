"""Mixtral."""

from __future__ import annotations

from model_families.case import Case, Served

CASES: dict[str, Case] = {
    "mixtral": Case("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 503}),
    "mixtral-window": Case(
        "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8, "num_key_value_heads": 1}
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("mixtral", page_size=8, chunk=32, tp=4, attn_dp=4, ep=2, redundant=2, mixed=True),
]
