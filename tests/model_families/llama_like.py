"""Families that are Llama but for factors, biases, positions or norms."""

from __future__ import annotations

from typing import Any

from model_families.case import YARN, Case, Served, rope


def _as_mimo(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of Qwen2, with a layer that guesses ahead."""
    ahead = {
        name.replace("model.layers.0.", "model.mtp_layers.0."): tensor for name, tensor in tensors.items() if ".0." in name
    }
    raw = {**raw, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    return raw, {**tensors, **{name: tensor.clone() for name, tensor in ahead.items()}}


def _stablelm(**kwargs: Any) -> Case:
    return Case("StableLm", {"rope_parameters": rope("default", partial_rotary_factor=0.25), **kwargs}, without=("head_dim",))


CASES: dict[str, Case] = {
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
        without=("head_dim",),
    ),
    "stablelm": _stablelm(use_qkv_bias=True, vocab_size=503),
    "stablelm-parallel": _stablelm(
        use_parallel_residual=True, qk_layernorm=True, num_attention_heads=8, hidden_size=128, num_key_value_heads=2
    ),
    "smollm3": Case("SmolLM3", {"pad_token_id": None, "num_hidden_layers": 4, "rope_parameters": YARN}, without=("head_dim",)),
    "smollm3-windows": Case(
        "SmolLM3",
        {
            "pad_token_id": None,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        without=("head_dim",),
    ),
    "ernie4_5": Case("Ernie4_5", {"use_bias": True, "tie_word_embeddings": True, "head_dim": 64}),
    "exaone4": Case(
        "Exaone4", {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4, "num_key_value_heads": 4}
    ),
    "exaone4-full": Case("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "vocab_size": 503}),
    "mimo": Case("Qwen2", without=("head_dim",), rewrite=_as_mimo),
    "seed-oss": Case("SeedOss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "head_dim": 24}),
    "nemotron": Case(
        "Nemotron",
        {"hidden_act": "relu2", "rope_parameters": rope("default", partial_rotary_factor=0.5)},
        has_centered_norms=True,
    ),
    "nemotron-biases": Case(
        "Nemotron",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "num_key_value_heads": 1, "vocab_size": 503},
        has_centered_norms=True,
    ),
    "starcoder2": Case("Starcoder2", {"sliding_window": 8, "use_bias": True}, without=("head_dim",)),
    "starcoder2-plain": Case(
        "Starcoder2", {"use_bias": False, "num_key_value_heads": 4, "tie_word_embeddings": True}, without=("head_dim",)
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("granite", page_size=16, chunk=32, tp=2),
    Served("stablelm-parallel", page_size=1, chunk=32, mixed=True),
    Served("smollm3-windows", page_size=16, chunk=48, tp=2, mixed=True),
    Served("ernie4_5", page_size=64, chunk=-1),
    Served("exaone4", page_size=16, chunk=32, overlap=False),
    Served("mimo", page_size=16, chunk=64, drafts=True, in_matrix=True),
    Served("seed-oss", page_size=1, chunk=-1, tp=2, in_matrix=True),
    Served("nemotron", page_size=16, chunk=64, tp=4, mixed=True),
    Served("starcoder2", page_size=64, chunk=32, mixed=True),
]
