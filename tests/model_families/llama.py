"""Llama and Mistral."""

from __future__ import annotations

from model_families.case import LLAMA3, SEVERAL, YARN, Case, Served, rope

CASES: dict[str, Case] = {
    "llama": Case("Llama"),
    "llama-biases": Case(
        "Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 80, "num_key_value_heads": 4, "vocab_size": 503}
    ),
    "llama-linear": Case("Llama", {"rope_parameters": rope("linear", factor=2.0)}),
    "llama-dynamic": Case("Llama", {"rope_parameters": rope("dynamic", factor=2.0), "max_position_embeddings": 64}),
    "llama-llama3": Case("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 64}),
    "llama-yarn": Case("Llama", {"rope_parameters": YARN, "num_key_value_heads": 1}),
    "mistral": Case("Mistral", {"sliding_window": 8, "vocab_size": 503}),
    "mistral-full": Case("Mistral", {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 64}),
}
LIVE = [
    Served("llama", page_size=1, chunk=32, **SEVERAL),
    Served("mistral", page_size=16, chunk=-1, pp=2, overlap=False, **SEVERAL),
]
IN_PROCESS = [
    Served("llama-biases", page_size=64, chunk=-1, tp=4, attn_dp=4),
    Served("llama-linear", page_size=16, chunk=32, mixed=True, overlap=False, in_matrix=True),
    Served("llama-dynamic", page_size=1, chunk=16, mixed=True, in_matrix=True),
    Served("llama-llama3", page_size=16, chunk=32, pp=2, tp=2, mixed=True, in_matrix=True),
    Served("llama-yarn", page_size=64, chunk=64, overlap=False, in_matrix=True),
    Served("mistral-full", page_size=1, chunk=32, tp=4, mixed=True, in_matrix=True),
]
