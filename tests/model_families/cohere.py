"""Command R and its successors."""

from __future__ import annotations

from model_families.case import Case, Served

# Their configs have a padding token, which must be in the vocabulary.
CASES: dict[str, Case] = {
    "cohere": Case("Cohere", {"pad_token_id": None, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere-norms": Case(
        "Cohere",
        {
            "pad_token_id": None,
            "logit_scale": 0.8,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_attention_heads": 8,
            "vocab_size": 503,
        },
    ),
    "cohere2": Case("Cohere2", {"pad_token_id": None, "sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.6}),
}
LIVE = [
    Served("cohere2", page_size=16, chunk=32, tp=2, mixed=True),
]
IN_PROCESS = [
    Served("cohere-norms", page_size=64, chunk=64, tp=4, drafts=True, in_matrix=True),
]
