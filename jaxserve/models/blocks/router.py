"""The router of a mixture of experts: scores of all experts, the choice of some, and their weights. Whole on every device.

T tokens, E experts (of all shards), K experts per token. A choice rests on small differences, so all of it is float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.blocks.declare import Declare
from jaxserve.models.specs import MoESpec, RouterSpec


class RouterParams(NamedTuple):
    """Parameters."""

    gate: Any  # a Weight [hidden, E]
    bias: Any  # [E] or None
    correction: Any  # float32 [E] or None


class Routes(NamedTuple):
    weights: jax.Array  # float32 [T, K]
    experts: jax.Array  # int32 [T, K], the best first


def declare_router(spec: MoESpec, declare: Declare, prefix: str) -> RouterParams:
    exact = dataclasses.replace(declare, dtype=np.dtype(np.float32))
    declare, vector = exact if spec.router.in_float32 else declare, (spec.num_experts, "routes")
    correction = f"{prefix}.e_score_correction_bias"
    return RouterParams(
        declare.router(f"{prefix}.weight", spec.num_experts),
        declare.vector(f"{prefix}.bias", *vector) if spec.router.bias else None,
        exact.vector(correction, *vector) if spec.router.corrects_choice else None,
    )


def route(x: jax.Array, params: RouterParams, spec: RouterSpec, count: int) -> Routes:
    """x [T, hidden]; `count` experts for each token."""
    logits = params.gate.get_value().project(x.astype(jnp.float32) if spec.in_float32 else x, jnp.float32)
    if params.bias is not None:
        logits = logits + params.bias[...].astype(jnp.float32)
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, spec.jitter)
    scores = jax.nn.sigmoid(logits) if spec.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    weights, experts = _choose(scores, params.correction, spec, count)
    if spec.normalizes:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (jnp.maximum(total, spec.least_sum) if spec.least_sum else total)
    return Routes(weights if spec.scaling == 1.0 else weights * spec.scaling, experts)


def _choose(scores: jax.Array, correction: Any, spec: RouterSpec, count: int) -> Routes:
    """Of scores [T, E]; weights are the scores of the chosen."""
    wanted = scores if correction is None else scores + correction[...]
    if spec.limits_groups:
        wanted = _of_best_groups(wanted, spec)
    weights, experts = jax.lax.top_k(wanted, count)
    return Routes(weights if correction is None else jnp.take_along_axis(scores, experts, axis=-1), experts)


def _of_best_groups(scores: jax.Array, spec: RouterSpec) -> jax.Array:
    """[T, E] -> [T, E]: -inf for experts of groups that do not take part."""
    grouped = scores.reshape(len(scores), spec.num_groups, -1)
    best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1) if spec.group_score == "top2" else grouped.max(axis=-1)
    _, chosen = jax.lax.top_k(best, spec.chosen_groups)
    takes_part = jnp.any(chosen[:, :, None] == jnp.arange(spec.num_groups), axis=1)
    return jnp.where(takes_part[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _sparsemixer(logits: jax.Array, jitter: float) -> Routes:
    """The best expert, then the best of the others, each with its share among those that are nearly as good
    (https://arxiv.org/abs/2409.12136, without the noise of training). Of the first choice the second's shares know nothing."""

    def best(candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
        expert = jnp.argmax(candidates, axis=-1, keepdims=True)
        peak = jnp.max(candidates, axis=-1, keepdims=True)
        is_near = ~((peak - logits) / jnp.maximum(jnp.abs(logits), peak) > 2 * jitter)
        shares = jax.nn.softmax(jnp.where(is_near, candidates, -jnp.inf), axis=-1)
        return jnp.take_along_axis(shares, expert, axis=-1), expert

    first_weight, first = best(logits)
    is_first = jnp.arange(logits.shape[-1]) == first
    second_weight, second = best(jnp.where(is_first, -jnp.inf, logits))
    weights, experts = jnp.concatenate([first_weight, second_weight], -1), jnp.concatenate([first, second], -1)
    return Routes(weights, experts.astype(jnp.int32))
