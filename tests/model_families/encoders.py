"""Encoders: BERT, RoBERTa and its like, DistilBERT, ModernBERT, NomicBERT. Also in the forms of older files."""

from __future__ import annotations

import re
from typing import Any

from model_families.case import Case

_HEADS = ("num_key_value_heads", "head_dim", "tie_word_embeddings")  # of the base, which encoders have not
_NOMIC_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip


def _older_bert(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As TensorFlow's were converted, part of a model with a head."""

    def renamed(name: str) -> str:
        name = re.sub("LayerNorm.weight$", "LayerNorm.gamma", re.sub("LayerNorm.bias$", "LayerNorm.beta", name))
        return f"bert.{name}"

    defaults = ("layer_norm_eps", "type_vocab_size")
    raw = {name: value for name, value in raw.items() if name not in defaults}
    return {**raw, "position_embedding_type": "absolute"}, {renamed(name): tensor for name, tensor in tensors.items()}


def _older_modern_bert(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    thetas = {f"{name}_rope_theta": raw["rope_parameters"][kind]["rope_theta"] for name, kind in
              (("global", "full_attention"), ("local", "sliding_attention"))}  # fmt: skip
    raw = {name: value for name, value in raw.items() if name not in ("layer_types", "rope_parameters")}
    return {**raw, **thetas, "global_attn_every_n_layers": 3}, {f"model.{name}": tensor for name, tensor in tensors.items()}


def _older_nomic(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As its authors wrote it."""
    theta = raw["rope_parameters"]["rope_theta"]
    raw = {_NOMIC_KEYS.get(name, name): value for name, value in raw.items()}
    for name in ("rope_parameters", "hidden_act", "head_dim"):
        raw.pop(name)
    raw |= {
        "activation_function": "swiglu", "causal": False, "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "rotary_emb_base": theta, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_scaling_factor": None, "use_rms_norm": False, "parallel_block": False,
    }  # fmt: skip
    return raw, tensors


def _encoder(family: str, kwargs: dict[str, Any] | None = None, **fields: Any) -> Case:
    return Case(family, {"max_position_embeddings": 128, **(kwargs or {})}, _HEADS, is_encoder=True, **fields)


_WINDOWS: dict[str, Any] = {
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "local_attention": 8, "num_hidden_layers": 5, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip

ENCODERS: dict[str, Case] = {
    "bert": _encoder("Bert", {"vocab_size": 503}),
    "bert-older": _encoder("Bert", rewrite=_older_bert),
    "roberta": _encoder("Roberta", {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
    "xlm-roberta": _encoder("XLMRoberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "camembert": _encoder("Camembert", {"type_vocab_size": 1, "pad_token_id": 4}),
    "distilbert": _encoder("DistilBert", {"activation": "relu", "hidden_dim": 96}),
    "modernbert": _encoder("ModernBert", _WINDOWS),
    "modernbert-older": _encoder(
        "ModernBert", {**_WINDOWS, "attention_bias": True, "mlp_bias": True, "norm_bias": True}, rewrite=_older_modern_bert
    ),
    "nomic-bert": _encoder("NomicBert"),
    "nomic-bert-older": _encoder("NomicBert", rewrite=_older_nomic),
}
