"""The router's variants against Transformers' routers, on scores that are close to each other and far apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import DeepseekV2Config, DeepseekV3Config, Ernie4_5_MoeConfig, GptOssConfig, MixtralConfig, PhimoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from jaxserve.models import MoESpec, RouterSpec
from jaxserve.models.blocks.router import RouterParams, route
from jaxserve.models.weight import PlainWeight

HIDDEN = 64
_V2 = {"hidden_size": HIDDEN, "n_routed_experts": 24, "num_experts_per_tok": 5, "routed_scaling_factor": 3.5}
_V3 = {**_V2, "n_group": 6, "topk_group": 3}
_ROUTED_AS_V3: dict[str, Any] = {"scoring": "sigmoid", "corrects_choice": True, "scaling": 3.5, "group_score": "top2"}

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (
        MixtralTopKRouter, MixtralConfig(hidden_size=HIDDEN, num_local_experts=8), {"normalizes": True},
    ),
    "gpt-oss": (
        GptOssTopKRouter, GptOssConfig(hidden_size=HIDDEN, num_local_experts=32), {"normalizes": True, "bias": True},
    ),
    "phimoe": (
        PhimoeTopKRouter,
        PhimoeConfig(hidden_size=HIDDEN, num_local_experts=6, router_jitter_noise=0.2),
        {"scoring": "sparsemixer", "jitter": 0.2},
    ),
    "deepseek-v2-groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**_V2, topk_method="group_limited_greedy", n_group=8, topk_group=2),
        {"scaling": 3.5, "num_groups": 8, "chosen_groups": 2},
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**_V3),
        {**_ROUTED_AS_V3, "num_groups": 6, "chosen_groups": 3, "normalizes": True, "least_sum": 1e-20},
    ),
    "deepseek-v3-one-group": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**{**_V3, "n_group": 1, "topk_group": 1}, norm_topk_prob=False),
        _ROUTED_AS_V3,
    ),
    "ernie": (
        Ernie4_5_MoeTopKRouter,
        Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_num_experts=12, moe_k=3),
        {"corrects_choice": True, "normalizes": True, "least_sum": 1e-12, "in_float32": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("name", CASES)
def test_as_transformers(name: str, spread: float) -> None:
    router_class, config, fields = CASES[name]
    torch.manual_seed(0)
    router = router_class(config).eval()
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(0, spread)
    x = torch.randn(200, HIDDEN) * HIDDEN**-0.5
    with torch.no_grad():
        _, weights, experts = router(x)
    tensors = {key.rpartition(".")[2]: jnp.asarray(value.numpy().squeeze()) for key, value in router.state_dict().items()}
    vectors = (nnx.Param(tensors[key]) if key in tensors else None for key in ("bias", "e_score_correction_bias"))
    params = RouterParams(nnx.Param(PlainWeight(tensors["weight"].T)), *vectors)
    found = jax.jit(lambda x: route(x, params, RouterSpec(**fields), weights.shape[1]))(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(
        _by_expert(found.weights, found.experts), _by_expert(weights, experts), atol=1e-5 * max(1, spread)
    )


def _by_expert(weights: Any, experts: Any) -> np.ndarray:
    """[T, E], as the order of choices does not matter."""
    weights, experts = np.asarray(weights), np.asarray(experts)
    dense = np.zeros((len(weights), experts.max() + 1), np.float32)
    np.put_along_axis(dense, experts, weights, axis=1)
    return dense


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_groups": 5}, "n_group=5 must divide num_experts=16"),
        ({"num_groups": 4, "chosen_groups": 5}, "topk_group=5 must not exceed n_group=4"),
        ({"num_groups": 8, "chosen_groups": 2}, "num_experts_per_tok=5 must not exceed the 4 experts of topk_group=2 groups"),
        ({"num_groups": 16, "chosen_groups": 8, "group_score": "top2"}, "n_group=16 must leave at least 2 of num_experts=16"),
        ({"scoring": "sparsemixer"}, "num_experts_per_tok must be 2 for routing by sparsemixer, got 5"),
        ({"scoring": "tanh"}, "must be one of softmax, sigmoid, sparsemixer; got 'tanh'"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoESpec(num_experts=16, experts_per_token=5, intermediate_size=8, router=RouterSpec(**fields))
