"""Qwen2 and Qwen3."""

from __future__ import annotations

from model_families.case import SEVERAL, YARN, Case, Served

_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}

CASES: dict[str, Case] = {
    "qwen2": Case("Qwen2", without=("head_dim",), kwargs={"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-windows": Case("Qwen2", without=("head_dim",), kwargs={**_QWEN_WINDOW, "vocab_size": 503}),
    "qwen2-yarn": Case("Qwen2", without=("head_dim",), kwargs={"rope_parameters": YARN, "num_key_value_heads": 1}),
    "qwen3": Case("Qwen3", {"head_dim": 64, "num_attention_heads": 8}),
    "qwen3-biases": Case("Qwen3", {**_QWEN_WINDOW, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 80}),
}
LIVE = [
    Served("qwen3", page_size=16, chunk=32, tp=2, dp=2, mixed=True, drafts=True),
    Served("qwen2", page_size=64, chunk=64, mixed=True, radix=False),
    Served("qwen3", page_size=16, chunk=32, tp=4, mixed=True, overlap=False, **SEVERAL),
]
IN_PROCESS = [
    Served("qwen2-windows", page_size=1, chunk=48, mixed=True, overlap=False),
    Served("qwen2-yarn", page_size=16, chunk=64, tp=2, drafts=True, in_matrix=True),
    Served("qwen3-biases", page_size=64, chunk=64, tp=1, in_matrix=True),
]
