"""Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from model_families.case import SEVERAL, Case, Served

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}


_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 80}

CASES: dict[str, Case] = {
    "qwen2-moe": Case("Qwen2Moe", {**_SHARED, "num_experts_per_tok": 4, "vocab_size": 503}),
    "qwen2-moe-some-layers": Case(
        "Qwen2Moe",
        {
            **_SHARED,
            "num_hidden_layers": 5,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "qkv_bias": False,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-moe": Case("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": Case(
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
}
LIVE = [
    Served("qwen3-moe", page_size=16, chunk=32, tp=4, attn_dp=4, mixed=True, **SEVERAL),
]
IN_PROCESS = [
    Served("qwen2-moe", page_size=16, chunk=32, tp=2, mixed=True),
    Served("qwen3-moe-some-layers", page_size=1, chunk=48, radix=False, in_matrix=True),
]
