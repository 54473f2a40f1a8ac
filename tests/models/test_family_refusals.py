"""What a family's config.json may ask for and gets a sentence for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models import ModelConfig

# A case of `model_families`, keys of its config.json that are replaced (... : left out), and the sentence. Sorted by case.
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("bamba", {"mamba_d_head": 12}, r"mamba_n_heads=8 times mamba_d_head=12 must be mamba_expand \* hidden_size=128\."),
    ("bamba", {"mamba_n_groups": 3}, r"mamba_n_heads=8 must be a multiple of mamba_n_groups=3\."),
    ("bamba", {"mamba_d_conv": 1}, r"the convolution must see at least 2 tokens, got 1\."),
    ("bamba", {"attn_layer_indices": []}, r"attn_layer_indices must name at least one layer of .*=4, got \[\]\."),
    ("qwen3-next", {"linear_num_value_heads": 6}, r"linear_num_value_heads=6 must be a multiple of linear_num_key_heads=4\."),
    ("qwen3-next", {"linear_key_head_dim": 0}, r"linear_key_head_dim must be a whole number of at least 1, got 0\."),
    ("qwen3-next", {"layer_types": ["linear_attention"] * 4}, r"layer_types must have a layer of full_attention\."),
    ("baichuan", {"max_position_embeddings": ..., "model_max_length": 4096}, r"those of 13B, know positions by ALiBi"),
    ("deepseek-moe", {"moe_layer_freq": 0}, r"moe_layer_freq must be a whole number of at least 1, got 0\."),
    ("deepseek-moe", {"scoring_func": "tanh"}, r"scoring function must be one of softmax, sigmoid, .*; got 'tanh'\."),
    ("ernie-moe", {"moe_k": 9}, r"num_experts_per_tok=9 must not exceed num_experts=8\."),
    ("ernie-moe", {"use_bias": True}, r"use_bias must be false: Ernie's experts have no biases\."),
    ("deepseek-v2", {"norm_topk_prob": True}, r"norm_topk_prob must be false for DeepSeek V2"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, r"topk_method must be greedy or group_limited_greedy .*, got 'noaux_tc'\."),
    ("deepseek-v3", {"first_k_dense_replace": None}, r"first_k_dense_replace must be a whole number of at least 0, got None\."),
    ("deepseek-v3", {"kv_lora_rank": 0}, r"kv_lora_rank must be a whole number of at least 1, got 0\."),
    ("deepseek-v3", {"n_group": 3}, r"n_group=3 must divide num_experts=8\."),
    ("deepseek-v3", {"n_shared_experts": -1}, r"n_shared_experts must be a whole number of at least 1, got -1\."),
    ("deepseek-v3", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim must be even for rotary embeddings, got 7\."),
    ("deepseek-v3", {"scoring_func": "softmax"}, r"scoring_func must be sigmoid for this model family, got 'softmax'\."),
    ("glm", {"rope_parameters": {"partial_rotary_factor": 0}}, r"partial_rotary_factor must be above 0 and at most 1, got 0\."),
    ("glm4", {"hidden_act": "mish"}, r"hidden_act must be one of silu, .*; got 'mish'\."),
    ("glm4-moe", {"hidden_act": "mish"}, r"hidden_act must be one of silu, .*; got 'mish'\."),
    ("glm4-moe", {"n_group": 3}, r"n_group=3 must divide num_experts=16\."),
    ("glm4-moe", {"topk_group": 5}, r"topk_group=5 must not exceed n_group=4\."),
    ("granite-moe", {"logits_scaling": 0}, r"logits_scaling must be a number above 0, got 0\."),
    ("internlm2", {"num_key_value_heads": 3}, r"num_heads=8 must be a multiple of num_kv_heads=3\."),
    ("mixtral", {"num_experts_per_tok": 5}, r"num_experts_per_tok=5 must not exceed num_experts=4\."),
    ("mixtral", {"num_local_experts": 0}, r"num_local_experts must be a whole number of at least 1, got 0\."),
    ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv must be null, as queries, .* not clipped here; got 8\.0\."),
    ("phi3", {"attention_bias": True}, r"attention_bias must be false: Phi-3 has no biases\."),
    ("phi3", {"sliding_window": 0}, r"sliding_window must be at least 1 token, got 0\."),
    ("phi3-beyond", {"hidden_size": 96}, r"short_factor must have a number for each pair .* 6; got 8\."),
    ("phi3-beyond", {"original_max_position_embeddings": 1}, r"must be a whole number of at least 2, got 1\."),
    ("phimoe", {"num_experts_per_tok": 1}, r"num_experts_per_tok must be 2 for routing by sparsemixer, got 1\."),
    ("qwen2-moe", {"shared_expert_intermediate_size": 0}, r"shared_expert_intermediate_size must be a whole .*, got 0\."),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "sentence"), REFUSALS, ids=[f"{row[0]}-{'-'.join(row[1])}" for row in REFUSALS])
def test_what_a_family_cannot_do_is_said(
    case: str, changes: dict[str, Any], sentence: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = {**json.loads((checkpoint(case) / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
    with pytest.raises(ValueError, match=sentence) as raised:
        ModelConfig.from_pretrained(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / "config.json"))
