"""OLMo 2 and OLMo 3."""

from __future__ import annotations

from model_families.case import LLAMA3, YARN, Case, Served

# Their configs have a padding token, which must be in the vocabulary.
CASES: dict[str, Case] = {
    "olmo2": Case("Olmo2", {"pad_token_id": None, "vocab_size": 503}),
    "olmo2-biases": Case(
        "Olmo2", {"pad_token_id": None, "attention_bias": True, "num_key_value_heads": 4, "rope_parameters": LLAMA3}
    ),
    "olmo3": Case(
        "Olmo3",
        {
            "pad_token_id": None,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "num_key_value_heads": 1,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("olmo2", page_size=16, chunk=32, tp=4, mixed=True, in_matrix=True),
    Served("olmo3", page_size=1, chunk=48, tp=2, attn_dp=2),
]
