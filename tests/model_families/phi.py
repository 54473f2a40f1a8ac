"""Phi-3, and what came of it."""

from __future__ import annotations

from model_families.case import Case, Served, rope

# The token that pads must be in the vocabulary.
_PHI3 = {"pad_token_id": None}

CASES: dict[str, Case] = {
    "phi3": Case("Phi3", {**_PHI3, "sliding_window": 8, "vocab_size": 503}, without=("head_dim",)),
    "phi3-partial": Case(
        "Phi3",
        {
            **_PHI3,
            "num_key_value_heads": 1,
            "intermediate_size": 88,
            "tie_word_embeddings": True,
            "rope_parameters": rope("default", partial_rotary_factor=0.75),
        },
        without=("head_dim",),
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("phi3", page_size=16, chunk=32, tp=2, mixed=True),
    Served("phi3-partial", page_size=1, chunk=48, tp=4, overlap=False),
]
