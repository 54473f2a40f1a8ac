"""Gemma 2 and Gemma 3."""

from __future__ import annotations

from typing import Any

from model_families.case import SEVERAL, Case, Served, rope

_GEMMA: dict[str, Any] = {
    "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    **_GEMMA,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": rope("linear", factor=8.0) | {"rope_theta": 1e6},
        "sliding_attention": rope("default"),
    },
}

_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
_NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def _gemma3(**kwargs: Any) -> dict[str, Any]:
    """Fields of a Case."""
    return {"config_class": "Gemma3TextConfig", "has_centered_norms": True, "kwargs": {**_GEMMA3, **kwargs}}


CASES: dict[str, Case] = {
    "gemma2": Case("Gemma2", {**_GEMMA, **_CAPS, "num_hidden_layers": 3}, has_centered_norms=True),
    "gemma2-uncapped": Case(
        "Gemma2", {**_GEMMA, **_NO_CAPS, "num_key_value_heads": 1, "vocab_size": 503}, has_centered_norms=True
    ),
    "gemma3": Case("Gemma3", **_gemma3(head_dim=64, num_attention_heads=8)),
    "gemma3-images": Case("Gemma3", **_gemma3(attention_bias=True, num_key_value_heads=4), takes_images=True),
}
LIVE = [
    Served("gemma2", page_size=16, chunk=32, mixed=True, **SEVERAL),
    Served("gemma3", page_size=1, chunk=48, pp=4, mixed=True),
]
IN_PROCESS = [
    Served("gemma2-uncapped", page_size=64, chunk=64, tp=2, overlap=False, in_matrix=True),
    Served("gemma3-images", page_size=16, chunk=-1, overlap=False, in_matrix=True),
]
