"""DeepSeek V2 and V3, and Kimi K2."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served, rope

_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.0)


def _as_kimi(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """With a layer that guesses ahead, whose tensors stand behind those of the others."""
    ahead = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in tensors.items() if ".layers.2." in name}
    raw = {**raw, "architectures": ["KimiK2ForCausalLM"], "model_type": "kimi_k2", "num_nextn_predict_layers": 1}
    return raw, {**tensors, **ahead}


def _v2(**kwargs: Any) -> Case:
    return Case("DeepseekV2", {**_LATENTS, "head_dim": 8, **kwargs})


def v3(**kwargs: Any) -> dict[str, Any]:
    """Fields of a Case."""
    groups = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
    return {"kwargs": {**_LATENTS, **groups, **kwargs}, "without": ("head_dim",)}


CASES: dict[str, Case] = {
    "deepseek-v2-lite": _v2(
        q_lora_rank=None, topk_method="greedy", num_attention_heads=8, num_key_value_heads=8, rope_parameters=_YARN
    ),
    "deepseek-v2": _v2(topk_method="group_limited_greedy", n_group=4, topk_group=2, vocab_size=503),
    "deepseek-v3": Case("DeepseekV3", **v3(rope_parameters=_YARN, kv_lora_rank=48)),
    "deepseek-v3-halves": Case("DeepseekV3", **v3(rope_interleave=False, n_group=1, topk_group=1, tie_word_embeddings=True)),
    "kimi-k2": Case(
        "DeepseekV3", **v3(q_lora_rank=40, num_attention_heads=8, num_key_value_heads=8, n_shared_experts=1), rewrite=_as_kimi
    ),
}
LIVE = [
    Served("deepseek-v3", page_size=8, chunk=32, tp=2, dcp=2, mixed=True),
]
IN_PROCESS = [
    Served("kimi-k2", page_size=64, chunk=64, pp=2, tp=2, attn_dp=2, mixed=True),
    Served("deepseek-v3", page_size=8, chunk=64, tp=4, dcp=4, mixed=True),
    Served("deepseek-v2-lite", page_size=1, chunk=48, tp=4, attn_dp=2, dcp=2, drafts=True, in_matrix=True),
]
