"""A mixture of experts. Every shard routes all tokens and computes what falls to the experts that it holds.

A shard has slots of experts. Most often they hold each expert once, and whole; the server's options may have several shards
hold slices of the same experts, whose answers add up, or some experts be held by several shards (`ExpertSlots`).

Choices (a token and one of its experts) are sorted by expert, so that each expert's tokens stand together; those of experts of
other shards, and of slots without a token, go behind, into no expert's group, and are not computed. Results return to their
tokens by a gather and are added up in the order of the token's choices: what a token gets does not depend on what else is in
the step.

T tokens (of all shards, where attention is by data parallelism), K experts per token, E experts that this shard holds, I an
expert's intermediate size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.arrays import ALL_AXES
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.mlp import DenseMLP, activation
from jaxserve.models.blocks.router import RouterParams, declare_router, route
from jaxserve.models.context import StepContext
from jaxserve.models.grouped import Groups
from jaxserve.models.specs import ClampedSwiglu, MoESpec


class Routed(NamedTuple):
    """What a mixture tells of its choices, as far as the step wants to know."""

    counts: jax.Array | None = None  # int32 [experts]: tokens that went to each
    experts: jax.Array | None = None  # int32 [A, K]: each token's, of all shards; by the checkpoint's numbers, best first


class MoE(nnx.Module):
    def __init__(self, spec: MoESpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        slots = declare.slots_of(spec.num_experts)
        self.num_experts, self.slices = slots.per_device, slots.slices  # local
        self.slot_table = declare.slot_table()
        size, hidden, experts = spec.intermediate_size, declare.hidden_size, f"{prefix}.experts"
        gate_up = [{f"{experts}.{e}.{name}_proj.weight": size for name in ("gate", "up")} for e in range(spec.num_experts)]
        down = [{f"{experts}.{e}.down_proj.weight": hidden} for e in range(spec.num_experts)]
        self.router, self.router_bias, self.correction = declare_router(spec, declare, f"{prefix}.gate")
        self.gate_up = declare.expert_matrices(gate_up, hidden, ("hidden", "expert_gate_up"), f"{experts}.gate_up_proj")
        self.down = declare.expert_matrices(down, size, ("expert_mlp", "hidden"), f"{experts}.down_proj")
        inner_bias, bias = (f"{experts}.{name}_proj_bias" for name in ("gate_up", "down"))
        count = spec.num_experts
        self.gate_up_bias = declare.expert_vectors(inner_bias, count, (size, size), "expert_gate_up") if spec.bias else None
        self.down_bias = declare.expert_vectors(bias, count, (hidden,), "hidden") if spec.bias else None
        # Several shared experts are one in checkpoints. Its gate is a router of one.
        self.shared = DenseMLP(spec.shared, declare, f"{prefix}.shared_experts") if spec.shared is not None else None
        self.shared_gate = declare.router(f"{prefix}.shared_expert_gate.weight", 1) if spec.gates_shared else None

    def __call__(self, x: jax.Array, context: StepContext) -> tuple[jax.Array, Routed]:
        """x [tokens of this shard, hidden] -> (as much, what is told of the choices)."""
        x = context.of_all.exchange.gather(x)
        with jax.named_scope("route"):
            params = RouterParams(self.router, self.router_bias, self.correction)
            weights, experts = route(x, params, self.spec.router, self.spec.experts_per_token)
            sorted_ = _sort(self._local(self._slots(experts, context), context.of_all.is_live), self.num_experts)
        with jax.named_scope("experts"):
            rows = x[sorted_.choices // self.spec.experts_per_token]
            if self.spec.weighs_inputs:
                rows = (rows * weights.reshape(-1)[sorted_.choices][:, None]).astype(x.dtype)
            gate, up = jnp.split(_projected(rows, self.gate_up, self.gate_up_bias, sorted_.groups), 2, axis=-1)
            inner = activation(self.spec.act)(gate) * up if self.spec.swiglu is None else _swiglu(gate, up, self.spec.swiglu)
            rows = _projected(inner, self.down, self.down_bias, sorted_.groups)
        with jax.named_scope("combine"):
            is_mine = sorted_.groups.of_row < self.num_experts
            rows = jnp.where(is_mine[:, None], rows, 0)[sorted_.places].reshape(*experts.shape, -1)
            wide = rows.astype(jnp.float32)
            out = jnp.sum(wide if self.spec.weighs_inputs else wide * weights[..., None], axis=1)
        out = out.astype(x.dtype)
        if self.shared is not None:
            with jax.named_scope("shared"):
                out = out + self._shared(x, self.shared)
        counts = _counts(experts, context.of_all.is_live, self.spec.num_experts) if context.counts_experts else None
        routed = Routed(counts, experts if context.returns_experts else None)
        return context.of_all.exchange.sum_own(out), routed

    def _shared(self, x: jax.Array, shared: DenseMLP) -> jax.Array:
        """This shard's part of what the shared experts add [T, hidden]."""
        out = shared.partial(x)
        if self.shared_gate is None:
            return out
        gate = jax.nn.sigmoid(self.shared_gate.get_value().project(x, jnp.float32))
        return (out * gate).astype(x.dtype)

    def _slots(self, experts: jax.Array, context: StepContext) -> jax.Array:
        """int32 [T, K]: slots that hold these experts. Several take turns by the token's position, which, as the order that
        answers add up in, is the same whatever else is in the step."""
        if self.slot_table is None:
            return experts
        table = self.slot_table[...]
        slots: jax.Array = table[experts, 1 + context.of_all.positions[:, None] % table[experts, 0]]
        return slots

    def _local(self, slots: jax.Array, is_live: jax.Array | None) -> jax.Array:
        """int32 [T, K]: this shard's experts from 0; E for all that it has not to compute."""
        group = jax.lax.axis_index(ALL_AXES)
        if self.slices > 1:
            group = group // self.slices
        local = slots - group * self.num_experts
        is_mine = (local >= 0) & (local < self.num_experts)
        if is_live is not None:
            is_mine &= is_live[:, None]
        return jnp.where(is_mine, local, self.num_experts)


def _projected(rows: jax.Array, weight: Any, bias: Any, groups: Groups) -> jax.Array:
    """Each row times its expert's matrix, plus its expert's vector."""
    out: jax.Array = weight.get_value().project_groups(rows, groups)
    return out if bias is None else out + bias[...].at[groups.of_row].get(mode="clip")


def _swiglu(gate: jax.Array, up: jax.Array, spec: ClampedSwiglu) -> jax.Array:
    gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
    return (up + 1) * gate * jax.nn.sigmoid(spec.alpha * gate)


def _counts(experts: jax.Array, is_live: jax.Array | None, num_experts: int) -> jax.Array:
    """How often each expert stands in int32 [T, K]; slots without a token do not count."""
    is_chosen = experts.reshape(-1)[None] == jnp.arange(num_experts)[:, None]
    if is_live is not None:
        is_chosen &= jnp.repeat(is_live, experts.shape[1])[None]
    return jnp.sum(is_chosen, axis=1, dtype=jnp.int32)


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
