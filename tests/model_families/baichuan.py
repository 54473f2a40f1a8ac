"""Baichuan of 7B, which Transformers does not know: a Llama in other tensors."""

from __future__ import annotations

from typing import Any

from model_families.case import Case


def _as_baichuan(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{prefix}.{name}_proj.weight") for name in "qkv"]
        tensors[f"{prefix}.W_pack.weight"] = torch.cat(parts)
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    named = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "torch_dtype": "float32"}
    return {**{name: raw[name] for name in kept}, **named}, tensors


CASES: dict[str, Case] = {
    "baichuan": Case("Llama", {"num_key_value_heads": 4, "vocab_size": 503}, rewrite=_as_baichuan),
}
