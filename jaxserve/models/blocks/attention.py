"""Self-attention. What a token attends to is not known here: `attend` rotates q and k, writes k and v and answers.

q, k and v are one matrix; its columns go key/value head by key/value head: the group's query heads, then k, then v. So a shard
of the columns is a set of whole groups, and one matmul feeds the attention. With more devices than key/value heads each head is
repeated. Dimensions of a head of q and k go as they are rotated (`RopeConfig.head_order`).

T tokens, H local query heads, K local key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.kernels.rotary import Rotary
from jaxserve.models.arrays import KVGroups, Rows
from jaxserve.models.blocks.attend import BoundAttend, HeadInputs
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.norm import factors
from jaxserve.models.blocks.qk_norm import QKNorm
from jaxserve.models.blocks.shards import sum_shards
from jaxserve.models.context import StepContext
from jaxserve.models.specs import SelfAttentionSpec, TemperatureTuning
from jaxserve.models.weight import linear


class SelfAttention(nnx.Module):
    def __init__(self, spec: SelfAttentionSpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        self.num_heads = spec.num_heads // declare.attn_tp_size  # local, as the next
        self.num_kv_heads = max(spec.num_kv_heads // declare.attn_tp_size, 1)
        groups, rows = _columns(spec, declare.attn_tp_size)
        self.qkv = declare.fused_matrix(_parts(spec, prefix, "weight"), rows, "kv_groups", groups)
        dim = spec.head_dim
        gates = [Rows(0, (2 * head + 1) * dim, dim) for head in range(spec.num_heads)]
        gate, gate_bias = ({f"{prefix}.q_proj.{kind}": 2 * spec.num_heads * dim} for kind in ("weight", "bias"))
        self.gate = declare.fused_matrix(gate, gates, "heads") if spec.gates_output else None
        self.gate_bias = declare.fused_bias(gate_bias, gates, "heads") if spec.gates_output and spec.qkv_bias else None
        self.o = declare.matrix(f"{prefix}.o_proj.weight", spec.num_heads * spec.head_dim, "heads")
        bias_parts, norm = _parts(spec, prefix, "bias"), spec.qk_norm
        self.qkv_bias = declare.fused_bias(bias_parts, rows, "kv_groups", groups) if spec.qkv_bias else None
        self.o_bias = declare.vector(f"{prefix}.o_proj.bias", declare.hidden_size, "hidden") if spec.o_bias else None
        self.qk_norm = QKNorm(spec, declare, prefix) if norm is not None and spec.qk_norm_over != "head" else None
        head = _head_rows(0, 0, 1, spec)
        learned = norm if norm is not None and norm.has_weight and self.qk_norm is None else None
        self.q_norm = declare.norm(f"{prefix}.q_norm.weight", learned, spec.head_dim, "head_dim", head) if learned else None
        self.k_norm = declare.norm(f"{prefix}.k_norm.weight", learned, spec.head_dim, "head_dim", head) if learned else None
        self.sinks = declare.vector(f"{prefix}.sinks", spec.num_heads, "heads") if spec.sinks else None

    def __call__(self, x: jax.Array, context: StepContext, attend: BoundAttend) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv)."""
        num_tokens, group = len(x), self.num_heads // self.num_kv_heads
        qkv = linear(x, self.qkv, self.qkv_bias)
        qkv = qkv.reshape(num_tokens, self.num_kv_heads, group + 2, self.spec.head_dim)
        if self.qk_norm is not None:
            qkv = self.qk_norm(qkv, context)
        if self.spec.tuning is not None:
            queries = qkv[:, :, :group] * _temperatures(context.positions, self.spec.tuning).astype(qkv.dtype)
            qkv = jnp.concatenate([queries, qkv[:, :, group:]], axis=2)
        with jax.named_scope("attend"):
            out, kv = attend(HeadInputs(qkv, self._rotary(x, context), None if self.sinks is None else self.sinks[...]))
        out = out.reshape(num_tokens, -1)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(linear(x, self.gate, self.gate_bias))
        return sum_shards(linear(out, self.o), context, self.o_bias), kv

    def _rotary(self, x: jax.Array, context: StepContext) -> Rotary:
        cos, sin = context.cos_sin(self.spec)
        norm = self.spec.qk_norm
        if norm is None or self.qk_norm is not None:
            return Rotary(cos, sin)
        if not norm.has_weight:
            ones = jnp.ones(self.spec.head_dim, x.dtype)
            return Rotary(cos, sin, ones, ones, norm.eps)
        # Backends multiply in x's type. Where weights count from one, Transformers multiplies in float32: that makes bfloat16
        # logits at most a twentieth more exact (measured on tiny models), and takes a GPU three more launches per layer.
        return Rotary(cos, sin, factors(self.q_norm, norm, x.dtype), factors(self.k_norm, norm, x.dtype), norm.eps)


def _temperatures(positions: jax.Array, tuning: TemperatureTuning) -> jax.Array:
    """int32 [T] -> float32 [T, 1, 1, 1]."""
    steps = jnp.floor((positions + 1) / tuning.floor_scale)
    return (1 + tuning.strength * jnp.log1p(steps))[:, None, None, None]


def kv_copies(spec: SelfAttentionSpec, tp_size: int) -> int:
    """How often each key/value head is repeated so that every device has one."""
    return max(1, tp_size // spec.num_kv_heads)


def _parts(spec: SelfAttentionSpec, prefix: str, kind: str) -> dict[str, int]:
    """Tensor -> size of what is fused."""
    heads = {"q": spec.num_heads * (1 + spec.gates_output), "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    return {f"{prefix}.{part}_proj.{kind}": count * spec.head_dim for part, count in heads.items()}


def _columns(spec: SelfAttentionSpec, tp_size: int) -> tuple[KVGroups, list[Rows]]:
    """The order of the fused columns (see the module's docstring)."""
    dim, copies = spec.head_dim, kv_copies(spec, tp_size)
    q_heads = spec.group_size // copies
    rows: list[Rows] = []
    for group in range(spec.num_kv_heads * copies):
        kv_head = group // copies
        rows += [*_head_rows(0, group * q_heads, q_heads, spec, is_gated=spec.gates_output), *_head_rows(1, kv_head, 1, spec)]
        rows.append(Rows(2, kv_head * dim, dim))
    return KVGroups(spec.num_kv_heads, spec.group_size, dim), rows


def _head_rows(tensor: int, first: int, count: int, spec: SelfAttentionSpec, *, is_gated: bool = False) -> list[Rows]:
    """`count` heads of q or k, each in the order that is rotated, and behind each of q its gate, perhaps."""
    dim, order, stride = spec.head_dim, spec.rope.head_order(spec.head_dim), spec.head_dim * (1 + is_gated)
    if order == (range(dim),) and not is_gated:
        return [Rows(tensor, first * dim, count * dim)]
    heads = range(first, first + count)
    return [Rows(tensor, head * stride + part.start, len(part), part.step) for head in heads for part in order]
