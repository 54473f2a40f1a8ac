"""Llama 4's language model."""

from __future__ import annotations

from typing import Any

from model_families.case import LLAMA3, Case, Served, rope

_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.4,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
}


def _llama4(config: str = "Llama4TextConfig", **kwargs: Any) -> Case:
    # Its config has a padding token, which must be in the vocabulary.
    return Case("Llama4", {**_LLAMA4, "pad_token_id": None, **kwargs}, config_class=config)


CASES: dict[str, Case] = {
    "llama4": _llama4(rope_parameters=LLAMA3, vocab_size=503),
    "llama4-dense-first": _llama4(
        rope_parameters=rope("default"),
        use_qk_norm=False,
        attention_bias=True,
        moe_layers=[1, 2, 3],
        no_rope_layers=[0, 1, 1, 0],
        num_key_value_heads=4,
        num_experts_per_tok=2,
        head_dim=64,
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
    ),
}
LIVE = [
    Served("llama4", page_size=16, chunk=48, tp=2, mixed=True),
]
IN_PROCESS = [
    Served("llama4-dense-first", page_size=1, chunk=-1, drafts=True),
]
