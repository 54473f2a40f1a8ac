"""A mixture of experts. A shard holds whole experts; every shard routes all tokens and computes what falls to its own.

Choices (a token and one of its experts) are sorted by expert, so that each expert's tokens stand together; those of experts of
other shards, and of slots without a token, go behind, into no expert's group, and are not computed. Results return to their
tokens by a gather and are added up in the order of the token's choices: what a token gets does not depend on what else is in
the step.

T tokens, K experts per token, E experts of this shard, I an expert's intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.arrays import TENSOR_AXIS
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.mlp import activation
from jaxserve.models.blocks.shards import sum_shards
from jaxserve.models.context import StepContext
from jaxserve.models.grouped import Groups
from jaxserve.models.specs import MoESpec


class MoE(nnx.Module):
    def __init__(self, spec: MoESpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        self.num_experts = spec.num_experts // declare.tp_size  # local
        size, hidden, experts = spec.intermediate_size, declare.hidden_size, f"{prefix}.experts"
        gate_up = [{f"{experts}.{e}.{name}_proj.weight": size for name in ("gate", "up")} for e in range(spec.num_experts)]
        down = [{f"{experts}.{e}.down_proj.weight": hidden} for e in range(spec.num_experts)]
        self.router = declare.router(f"{prefix}.gate.weight", spec.num_experts)
        self.gate_up = declare.expert_matrices(gate_up, hidden, ("hidden", "expert_mlp"), f"{experts}.gate_up_proj")
        self.down = declare.expert_matrices(down, size, ("expert_mlp", "hidden"), f"{experts}.down_proj")

    def __call__(self, x: jax.Array, context: StepContext) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        with jax.named_scope("route"):
            weights, experts = self._route(x)
            sorted_ = _sort(self._local(experts, context.is_live), self.num_experts)
        with jax.named_scope("experts"):
            rows = x[sorted_.choices // self.spec.experts_per_token]
            gate, up = jnp.split(self.gate_up.get_value().project_groups(rows, sorted_.groups), 2, axis=-1)
            rows = self.down.get_value().project_groups(activation(self.spec.act)(gate) * up, sorted_.groups)
        with jax.named_scope("combine"):
            is_mine = sorted_.groups.of_row < self.num_experts
            rows = jnp.where(is_mine[:, None], rows, 0)[sorted_.places].reshape(*experts.shape, -1)
            out = jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1)
        return sum_shards(out.astype(x.dtype))

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, K] each: float32 weights, and experts of all shards, the likeliest first."""
        probabilities = jax.nn.softmax(self.router.get_value().project(x, jnp.float32), axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.spec.experts_per_token)
        if self.spec.normalizes_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, experts

    def _local(self, experts: jax.Array, is_live: jax.Array | None) -> jax.Array:
        """int32 [T, K]: this shard's experts from 0; E for all that it has not to compute."""
        local = experts - jax.lax.axis_index(TENSOR_AXIS) * self.num_experts
        is_mine = (local >= 0) & (local < self.num_experts)
        if is_live is not None:
            is_mine &= is_live[:, None]
        return jnp.where(is_mine, local, self.num_experts)


class _Sorted(NamedTuple):
    choices: jax.Array  # int32 [T * K]: in each place, the number of the choice that goes there
    places: jax.Array  # int32 [T * K]: the inverse
    groups: Groups


def _sort(experts: jax.Array, num_experts: int) -> _Sorted:
    """By expert int32 [T, K]; `num_experts` stands for none of them."""
    flat = experts.reshape(-1)
    choices = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[None] == jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return _Sorted(choices, jnp.argsort(choices), Groups(sizes, flat[choices]))
