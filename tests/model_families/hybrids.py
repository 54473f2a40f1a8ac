"""Families most of whose layers keep a state in place of keys and values: Qwen3-Next, Qwen3.5, Bamba and Granite 4."""

from __future__ import annotations

from typing import Any

from model_families.case import SEVERAL, Case, Served, rope

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "pad_token_id": None,
}


def _remember(model: Any) -> None:
    """Drawn like other vectors, decays would forget within a few tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-5.0, 1.0)
        elif name.endswith("linear_attn.norm.weight"):
            parameter.add_(1.0)


def _qwen3_next(**kwargs: Any) -> Case:
    return Case("Qwen3Next", {**_DELTA_NET, **kwargs}, has_centered_norms=True, prepare=_remember)


def _qwen3_5(family: str = "Qwen3_5", **kwargs: Any) -> Case:
    config_class = f"{family}TextConfig"
    return Case(family, {**_DELTA_NET, **kwargs}, config_class=config_class, has_centered_norms=True, prepare=_remember)


def _bamba(**kwargs: Any) -> Case:
    return Case("Bamba", {**_MAMBA, **kwargs}, prepare=_remember, without=("head_dim",))


def _as_published(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    return {**raw, "layer_types": [kinds[kind] for kind in raw["layer_types"]]}, tensors


def _granite(**kwargs: Any) -> Case:
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.3}
    common = {**_MAMBA, **factors, "shared_intermediate_size": 48, "num_experts_per_tok": 3, "mamba_d_state": 16}
    del common["attn_layer_indices"]
    return Case("GraniteMoeHybrid", {**common, **kwargs}, prepare=_remember, without=("head_dim",), rewrite=_as_published)


CASES: dict[str, Case] = {
    "qwen3-next": _qwen3_next(),
    "qwen3-next-some-layers": _qwen3_next(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=3,
        mlp_only_layers=[0],
        linear_num_value_heads=4,
        linear_conv_kernel_dim=3,
        norm_topk_prob=False,
        vocab_size=503,
    ),
    "qwen3.5": _qwen3_5(num_hidden_layers=5, vocab_size=503, rope_parameters=rope("default", partial_rotary_factor=0.5)),
    "qwen3.5-moe": _qwen3_5("Qwen3_5Moe", linear_num_key_heads=8),
    "bamba": _bamba(),
    "bamba-groups": _bamba(
        mamba_n_groups=4, mamba_conv_bias=False, mamba_proj_bias=True, mamba_d_conv=3, attn_layer_indices=[0, 3], vocab_size=503
    ),
    "bamba-two-groups": _bamba(mamba_n_groups=2, num_key_value_heads=4, time_step_limit=(0.3, 0.8)),
    "granite-hybrid": _granite(layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=8),
    "granite-hybrid-dense": _granite(
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_hidden_layers=3,
        num_local_experts=0,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
}
LIVE = [
    Served("qwen3-next", page_size=16, chunk=32, tp=2, mixed=True, states=320),
    Served("bamba", page_size=16, chunk=48, mixed=True, states=320),
]
IN_PROCESS = [
    Served("granite-hybrid", page_size=16, chunk=32, tp=2, states=320),
    Served("qwen3-next-some-layers", page_size=1, chunk=48, pp=2, tp=2, overlap=False, states=320, drafts=True),
    Served("bamba-groups", page_size=64, chunk=64, tp=4, states=320, **SEVERAL, in_matrix=True),
    Served("bamba-two-groups", page_size=16, chunk=32, tp=4, attn_dp=2, mixed=True, states=320, drafts=True),
]
