"""Phi-3, and what came of it.

Transformers rotates a sequence by LongRoPE's long factors once it is longer than the original context, a server all of them if
one can be. So the cases are served where both agree: within the original context, and beyond one of a few tokens.
"""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served, rope


def _long_rope(original_len: int, pairs: int, **params: Any) -> dict[str, Any]:
    """Of heads with so many pairs of rotated dimensions."""
    factors = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.7 * pair for pair in range(pairs)],
    }
    params = {**factors, "original_max_position_embeddings": original_len, **params}
    return {"rope_parameters": rope("longrope", **params), "original_max_position_embeddings": original_len}


def _phi3(**kwargs: Any) -> Case:
    # Its config has a padding token, which must be in the vocabulary.
    return Case("Phi3", {"pad_token_id": None, **kwargs}, without=("head_dim",))


CASES: dict[str, Case] = {
    "phi3": _phi3(sliding_window=8, vocab_size=503),
    "phi3-within": _phi3(**_long_rope(256, 8), num_key_value_heads=4, max_position_embeddings=1024),
    "phi3-beyond": _phi3(**_long_rope(4, 8, attention_factor=1.2), hidden_size=128, num_attention_heads=8),
    "phi4-mini": _phi3(
        **_long_rope(4, 6, partial_rotary_factor=0.75), num_key_value_heads=1, intermediate_size=88, tie_word_embeddings=True
    ),
}
LIVE = [
    Served("phi4-mini", page_size=16, chunk=32, tp=2, mixed=True, in_matrix=True),
]
IN_PROCESS = [
    Served("phi3-within", page_size=64, chunk=64, overlap=False, in_matrix=True),
    Served("phi3-beyond", page_size=1, chunk=48, tp=4, mixed=True),
]
