"""Norms of queries and keys that differ from head to head, or go over all heads together. (Where all heads share the weights of
a norm over each, attention backends norm while they rotate.)

The weights are whole on every device, which takes those of its heads.

T tokens, K local key/value heads of G queries, D head_dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.arrays import TENSOR_AXIS, ArrayInfo, Rows, Source
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.context import StepContext
from jaxserve.models.exchange import add_up
from jaxserve.models.specs import SelfAttentionSpec


class QKNorm(nnx.Module):
    def __init__(self, spec: SelfAttentionSpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        self.tp_size = declare.attn_tp_size
        self.q = _declare(spec, declare, f"{prefix}.q_norm", spec.num_heads)
        self.k = _declare(spec, declare, f"{prefix}.k_norm", spec.num_kv_heads)

    def __call__(self, qkv: jax.Array, context: StepContext) -> jax.Array:
        """[T, K, G + 2, D] -> the same."""
        q = self._normed(qkv[:, :, :-2], self.q, self.spec.num_heads, context)
        k = self._normed(qkv[:, :, -2:-1], self.k, self.spec.num_kv_heads, context)
        return jnp.concatenate([q, k, qkv[:, :, -1:]], axis=2)

    def _normed(self, x: jax.Array, weight: Any, num_heads: int, context: StepContext) -> jax.Array:
        """x [T, K, N, D]: of `num_heads` in the whole model those of this shard."""
        norm = self.spec.qk_norm
        assert norm is not None
        wide = x.astype(jnp.float32)
        if norm.subtracts_mean:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        squares = wide * wide
        if self.spec.qk_norm_over == "all_heads":
            held = self.tp_size * x.shape[1] * x.shape[2]  # by all shards: more than `num_heads` where some are repeated
            own = jnp.sum(squares, axis=(1, 2, 3), keepdims=True)
            mean = add_up(own, TENSOR_AXIS, in_order=context.batch_invariant) / (held * x.shape[3])
        else:
            mean = jnp.mean(squares, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(mean + norm.eps)
        return (wide * self._local(weight, num_heads, x.shape[1:])).astype(x.dtype)

    def _local(self, weight: Any, num_heads: int, shape: tuple[int, ...]) -> jax.Array:
        """float32 of `shape` [K, N, D]: this shard's heads, as they are rotated."""
        whole = weight[...].astype(jnp.float32).reshape(num_heads, self.spec.head_dim)
        order = [dim for part in self.spec.rope.head_order(self.spec.head_dim) for dim in part]
        if order != sorted(order):
            whole = whole[:, jnp.asarray(order)]
        count = shape[0] * shape[1]
        if self.tp_size > 1:
            first = jax.lax.axis_index(TENSOR_AXIS) * num_heads // self.tp_size  # several shards may have the same head
            whole = jax.lax.dynamic_slice_in_dim(whole, first, count)
        return whole.reshape(shape)


def _declare(spec: SelfAttentionSpec, declare: Declare, name: str, num_heads: int) -> nnx.Param[Any]:
    dim, weight = spec.head_dim, f"{name}.weight"
    assert spec.qk_norm is not None and not spec.qk_norm.bias and not spec.qk_norm.counts_from_one
    if spec.qk_norm_over == "all_heads":
        return declare.norm(weight, spec.qk_norm, num_heads * dim, "head_dim")
    if spec.qk_norm_over == "each_head":
        source = Source((weight,), ((num_heads, dim),), (Rows(0, 0, num_heads),), transposed=False)
        return nnx.Param(ArrayInfo((num_heads, dim), declare.dtype, ("every_head", "head_dim"), source, mean=1.0, std=0.02))
    names = tuple(f"{name}.{head}.weight" for head in range(num_heads))
    source = Source(names, ((dim,),) * num_heads, tuple(Rows(head, 0, dim) for head in range(num_heads)), transposed=False)
    return nnx.Param(ArrayInfo((num_heads * dim,), declare.dtype, ("head_dim",), source, mean=1.0, std=0.02))
