"""Mamba 2. Its state is not known here: `attend` brings it.

Heads are split over the shards, and columns of their fused projection go head by head: the gate of its output, then x. B and C
of all groups, and the heads' time steps, are computed whole on every shard, which takes what its heads need: they are a small
part, and there may be fewer groups than shards.

T tokens, H local heads of P channels, N state_dim, G groups that they belong to.
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
from jaxserve.kernels.state_rows import StateRows
from jaxserve.models.arrays import TENSOR_AXIS, Rows
from jaxserve.models.blocks.attend import BoundAttend, StateInputs
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.mlp import activation
from jaxserve.models.blocks.shards import sum_shards
from jaxserve.models.blocks.state_inputs import States, log_decay
from jaxserve.models.context import StepContext
from jaxserve.models.specs import Mamba2Spec
from jaxserve.models.weight import linear


class Mamba2(nnx.Module):
    def __init__(self, spec: Mamba2Spec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        self.tp_size = declare.attn_tp_size
        self.num_heads = spec.num_heads // declare.attn_tp_size  # local, as the next
        self.num_groups = max(spec.num_groups // declare.attn_tp_size, 1)
        inner, of_groups = spec.inner_size, 2 * spec.num_groups * spec.state_dim
        size = 2 * inner + of_groups + spec.num_heads
        starts = [part + head * spec.head_dim for head in range(spec.num_heads) for part in (0, inner)]
        by_head = [Rows(0, start, spec.head_dim) for start in starts]
        behind = [Rows(0, 2 * inner, of_groups + spec.num_heads)]
        weight, bias = ({f"{prefix}.in_proj.{kind}": size} for kind in ("weight", "bias"))
        self.zx, self.bct = declare.fused_matrix(weight, by_head, "heads"), declare.fused_matrix(weight, behind, "every_head")
        self.zx_bias = declare.fused_bias(bias, by_head, "heads") if spec.proj_bias else None
        self.bct_bias = declare.fused_bias(bias, behind, "every_head") if spec.proj_bias else None
        conv, channels = f"{prefix}.conv1d", inner + of_groups
        of_x, of_bc = [Rows(0, 0, inner)], [Rows(0, inner, of_groups)]
        self.taps = declare.conv(f"{conv}.weight", channels, spec.conv_size, "heads", of_x)
        self.taps_bc = declare.conv(f"{conv}.weight", channels, spec.conv_size, "every_head", of_bc)
        named = {f"{conv}.bias": channels}
        self.conv_bias = declare.fused_bias(named, of_x, "heads") if spec.conv_bias else None
        self.conv_bias_bc = declare.fused_bias(named, of_bc, "every_head") if spec.conv_bias else None
        in_float32 = dataclasses.replace(declare, dtype=np.dtype(np.float32))
        self.a_log = in_float32.vector(f"{prefix}.A_log", spec.num_heads, "heads")
        self.dt_bias = in_float32.vector(f"{prefix}.dt_bias", spec.num_heads, "heads")
        self.skip = in_float32.vector(f"{prefix}.D", spec.num_heads, "heads")
        self.norm = declare.norm(f"{prefix}.norm.weight", spec.norm, inner, "heads")
        self.o = declare.matrix(f"{prefix}.out_proj.weight", inner, "heads")
        self.o_bias = declare.vector(f"{prefix}.out_proj.bias", declare.hidden_size, "hidden") if spec.proj_bias else None

    def __call__(self, x: jax.Array, context: StepContext, attend: BoundAttend) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv)."""
        spec, num_tokens, shape = self.spec, len(x), (self.num_groups, self.num_heads // self.num_groups)
        gates, inner = jnp.split(linear(x, self.zx, self.zx_bias).reshape(num_tokens, self.num_heads, -1), 2, axis=-1)
        bc, step = jnp.split(linear(x, self.bct, self.bct_bias), [2 * spec.num_groups * spec.state_dim], axis=-1)
        step = self._local(step, spec.num_heads).astype(jnp.float32)
        step = jnp.clip(jax.nn.softplus(step + self.dt_bias[...]), spec.least_step, spec.most_step)
        decay = log_decay(self.a_log[...], step)

        def update(states: States, rows: StateRows) -> tuple[jax.Array, States]:
            with jax.named_scope("convolution"):
                act, bias, bias_bc = activation(spec.act), self.conv_bias, self.conv_bias_bc
                biases = (None if vector is None else vector[...] for vector in (bias, bias_bc))
                held = states["conv"], states["conv_bc"]
                channels, conv = causal_conv(inner.reshape(num_tokens, -1), self.taps[...], next(biases), held[0], rows)
                shared, conv_bc = causal_conv(bc, self.taps_bc[...], next(biases), held[1], rows)
            values = act(channels).astype(jnp.float32).reshape(num_tokens, self.num_heads, spec.head_dim)
            b, c = jnp.split(act(shared).reshape(num_tokens, 2 * spec.num_groups, spec.state_dim), 2, axis=1)
            b, c = self._local(b, spec.num_groups), self._local(c, spec.num_groups)
            with jax.named_scope("recurrence"):
                v = (step[..., None] * values).reshape(num_tokens, *shape, spec.head_dim)
                inputs = Recurrence(c, b, v, decay.reshape(num_tokens, *shape), None)
                out, heads = recur(inputs, states["heads"], rows, is_exact=x.dtype == jnp.float32)
            out = out.reshape(values.shape) + self.skip[...][:, None] * values
            return out, {"conv": conv, "conv_bc": conv_bc, "heads": heads}

        out, kv = attend(StateInputs(num_tokens, update))
        with jax.named_scope("gate"):
            # Transformers rounds to the model's type first, too.
            gated = out.astype(x.dtype).astype(jnp.float32) * activation("silu")(gates.astype(jnp.float32))
            normed = self._normed(gated.reshape(num_tokens, *shape, spec.head_dim)).astype(x.dtype)
        return sum_shards(linear(self.norm[...] * normed.reshape(num_tokens, -1), self.o), context, self.o_bias), kv

    def _local(self, x: jax.Array, count: int) -> jax.Array:
        """Of [T, count, ...] what this shard's heads need: its equal part, or the one that it shares with others."""
        if self.tp_size == 1:
            return x
        first = jax.lax.axis_index(TENSOR_AXIS) * count // self.tp_size
        return jax.lax.dynamic_slice_in_dim(x, first, max(count // self.tp_size, 1), axis=1)

    def _normed(self, x: jax.Array) -> jax.Array:
        """[T, G, H / G, P], each group by itself, which several shards may have parts of."""
        spec, squares = self.spec, jnp.sum(x * x, axis=(2, 3), keepdims=True)
        if self.tp_size > spec.num_groups:
            mine = jax.nn.one_hot(jax.lax.axis_index(TENSOR_AXIS) * spec.num_groups // self.tp_size, spec.num_groups)
            of_all = jax.lax.psum(squares[:, 0, 0] * mine, TENSOR_AXIS)
            squares = jnp.sum(of_all * mine, axis=1)[:, None, None, None]
        return x * jax.lax.rsqrt(squares * spec.num_groups / spec.inner_size + spec.norm.eps)
