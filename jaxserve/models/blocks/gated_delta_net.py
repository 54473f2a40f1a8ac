"""A gated delta net. Its state is not known here: `attend` brings it.

Columns of the fused projection go key head by key head: query, key, and of each of its value heads the value, then of each the
gate of its output. So a shard of the columns is a set of whole heads.

T tokens, G local key heads of H value heads each, K key_dim, V value_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.kernels.recurrence import causal_conv, recur
from jaxserve.kernels.recurrence_arrays import Recurrence
from jaxserve.kernels.rotary import rms_norm
from jaxserve.kernels.state_rows import StateRows
from jaxserve.models.arrays import Rows
from jaxserve.models.blocks.attend import BoundAttend, StateInputs
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.mlp import activation
from jaxserve.models.blocks.shards import sum_shards
from jaxserve.models.blocks.state_inputs import States, log_decay
from jaxserve.models.context import StepContext
from jaxserve.models.specs import GatedDeltaNetSpec
from jaxserve.models.weight import linear

_LEAST_SQUARE = 1e-6  # added to the squared length of a query or key


class GatedDeltaNet(nnx.Module):
    def __init__(self, spec: GatedDeltaNetSpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        self.num_key_heads = spec.num_key_heads // declare.attn_tp_size  # local
        of_keys, of_values = spec.num_key_heads * spec.key_dim, spec.num_value_heads * spec.value_dim
        sizes = {"q": of_keys, "k": of_keys, "v": of_values, "z": of_values}
        per_head = (spec.key_dim, spec.key_dim, spec.group_size * spec.value_dim, spec.group_size * spec.value_dim)
        projected = {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}
        self.qkvz = declare.fused_matrix(projected, _by_head(spec, (0, 1, 2, 3), (0, 0, 0, 0), per_head), "heads")
        rates = {f"{prefix}.{name}_proj.weight": spec.num_value_heads for name in ("b", "a")}
        self.ba = declare.fused_matrix(rates, _by_head(spec, (0, 1), (0, 0), (spec.group_size,) * 2), "heads")
        channels = _by_head(spec, (0, 0, 0), (0, of_keys, 2 * of_keys), per_head[:3])
        self.taps = declare.conv(f"{prefix}.conv1d.weight", 2 * of_keys + of_values, spec.conv_size, "heads", channels)
        in_float32 = dataclasses.replace(declare, dtype=np.dtype(np.float32))
        self.a_log = in_float32.vector(f"{prefix}.A_log", spec.num_value_heads, "heads")
        self.dt_bias = in_float32.vector(f"{prefix}.dt_bias", spec.num_value_heads, "heads")
        self.norm = declare.norm(f"{prefix}.norm.weight", spec.norm, spec.value_dim, "head_dim")
        self.o = declare.matrix(f"{prefix}.out_proj.weight", of_values, "heads")

    def __call__(self, x: jax.Array, context: StepContext, attend: BoundAttend) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv)."""
        spec, num_tokens, group = self.spec, len(x), self.spec.group_size
        mixed = linear(x, self.qkvz).reshape(num_tokens, self.num_key_heads, -1)
        channels, gates = jnp.split(mixed, [2 * spec.key_dim + group * spec.value_dim], axis=-1)
        rate, step = jnp.split(linear(x, self.ba).astype(jnp.float32).reshape(num_tokens, self.num_key_heads, -1), 2, axis=-1)
        a_log, dt_bias = (vector[...].reshape(self.num_key_heads, group) for vector in (self.a_log, self.dt_bias))
        decay, rate = log_decay(a_log, jax.nn.softplus(step + dt_bias)), jax.nn.sigmoid(rate)

        def update(states: States, rows: StateRows) -> tuple[jax.Array, States]:
            with jax.named_scope("convolution"):
                out, conv = causal_conv(channels.reshape(num_tokens, -1), self.taps[...], None, states["conv"], rows)
                out = activation(spec.act)(out).reshape(num_tokens, self.num_key_heads, -1)
            q, k, v = jnp.split(out, [spec.key_dim, 2 * spec.key_dim], axis=-1)
            v = v.reshape(num_tokens, self.num_key_heads, group, spec.value_dim)
            with jax.named_scope("recurrence"):
                inputs = Recurrence(_unit(q) * spec.key_dim**-0.5, _unit(k), v, decay, rate)
                out, heads = recur(inputs, states["heads"], rows, is_exact=x.dtype == jnp.float32)
            return out.astype(x.dtype), {"conv": conv, "heads": heads}

        out, kv = attend(StateInputs(num_tokens, update))
        with jax.named_scope("gate"):
            normed = rms_norm(out, self.norm[...], spec.norm.eps).reshape(num_tokens, -1)
            gated = normed * activation(spec.act)(gates.astype(jnp.float32)).reshape(num_tokens, -1)
        return sum_shards(linear(gated.astype(x.dtype), self.o), context), kv


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1, float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _LEAST_SQUARE)


def _by_head(spec: GatedDeltaNetSpec, tensors: tuple[int, ...], starts: tuple[int, ...], counts: tuple[int, ...]) -> list[Rows]:
    """Of each key head, one after the other, `counts` rows of these tensors, whose parts begin at `starts`."""
    parts = list(zip(tensors, starts, counts, strict=True))
    return [Rows(which, start + head * count, count) for head in range(spec.num_key_heads) for which, start, count in parts]
