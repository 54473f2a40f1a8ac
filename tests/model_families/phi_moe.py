"""Phi-3.5-MoE. Like Phi-3 it is served within the original context and beyond one of a few tokens; and as Transformers always
takes the short factors of this model, both sets are equal where the long ones count."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served, rope


def _long_rope(original_len: int, long_factor: list[float]) -> dict[str, Any]:
    params = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
        "long_factor": long_factor,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": original_len,
    }
    return {"rope_parameters": rope("longrope", **params), "original_max_position_embeddings": original_len}


def _phimoe(**kwargs: Any) -> Case:
    # Its config has a padding token, which must be in the vocabulary.
    return Case("Phimoe", {"pad_token_id": None, "router_jitter_noise": 0.2, "num_local_experts": 4, **kwargs})


CASES: dict[str, Case] = {
    "phimoe": _phimoe(sliding_window=8, num_local_experts=8, attention_bias=True, lm_head_bias=True, vocab_size=503),
    "phimoe-within": _phimoe(**_long_rope(256, [3.0] * 8), num_key_value_heads=4, max_position_embeddings=1024),
    "phimoe-beyond": _phimoe(**_long_rope(4, [1.0 + 0.1 * pair for pair in range(8)]), num_key_value_heads=1),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("phimoe", page_size=16, chunk=32, tp=2, mixed=True, drafts=True),
    Served("phimoe-beyond", page_size=64, chunk=64, in_matrix=True),
]
