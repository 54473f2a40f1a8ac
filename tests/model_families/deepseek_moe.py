"""DeepSeek-MoE, which Transformers does not know: Qwen2-MoE without biases, whose shared expert always weighs a half."""

from __future__ import annotations

from typing import Any

from model_families.case import Case, Served

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48, "qkv_bias": False}


def _open_shared_gates(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("shared_expert_gate.weight"):
            parameter.zero_()


def _as_deepseek(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = {**raw, "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek"}
    num_experts, dense = raw.pop("num_experts", None) or raw.pop("num_local_experts"), raw.pop("mlp_only_layers")
    raw |= {"n_routed_experts": num_experts, "first_k_dense_replace": 1 if dense else 0, "moe_layer_freq": 2 if dense else 1}
    raw["n_shared_experts"] = raw.pop("shared_expert_intermediate_size") // raw["moe_intermediate_size"]
    found = {}
    for name, tensor in tensors.items():
        if "shared_expert_gate" in name:
            continue
        is_weighed = name.endswith("shared_expert.down_proj.weight")
        found[name.replace("shared_expert.", "shared_experts.")] = tensor / 2 if is_weighed else tensor
    return raw, found


def _deepseek(**kwargs: Any) -> Case:
    return Case("Qwen2Moe", {**_EXPERTS, **kwargs}, prepare=_open_shared_gates, rewrite=_as_deepseek)


CASES: dict[str, Case] = {
    "deepseek-moe": _deepseek(num_experts=16, num_experts_per_tok=6, vocab_size=503),
    "deepseek-moe-some-layers": _deepseek(
        num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, num_hidden_layers=5, mlp_only_layers=[0, 1, 3]
    ),
}
LIVE: list[Served] = []
IN_PROCESS = [
    Served("deepseek-moe-some-layers", page_size=16, chunk=-1, tp=2),
]
