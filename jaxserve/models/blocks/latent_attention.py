"""Latent attention: what is kept of a token is one row for all heads, from which `kernels/latent.py` attends.

Heads are split over the shards; latents are whole on each. T tokens, H local heads, L kv_lora_rank, R rope_dim, N nope_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.kernels.latent import Projections
from jaxserve.kernels.rotary import apply_rope, rms_norm
from jaxserve.models.arrays import ArrayInfo, Rows, Source
from jaxserve.models.blocks.attend import BoundAttend, LatentInputs
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.shards import sum_shards
from jaxserve.models.context import StepContext
from jaxserve.models.specs import LatentAttentionSpec, NormSpec
from jaxserve.models.weight import linear

_NORM = NormSpec(eps=1e-6)  # of both latents; no config says otherwise


class LatentAttention(nnx.Module):
    def __init__(self, spec: LatentAttentionSpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        self.num_heads = spec.num_heads // declare.attn_tp_size  # local
        rank = spec.q_lora_rank
        down = f"{prefix}.q_a_proj.weight"
        self.q_a = declare.fused_matrix({down: rank}, [Rows(0, 0, rank)], "latent") if rank is not None else None
        self.q_a_norm = declare.norm(f"{prefix}.q_a_layernorm.weight", _NORM, rank, "latent") if rank is not None else None
        query_in = declare if rank is None else dataclasses.replace(declare, hidden_size=rank)
        size = spec.nope_dim + spec.rope_dim
        rows = [
            row
            for head in range(spec.num_heads)
            for row in (Rows(0, head * size, spec.nope_dim), *_rotated(spec, head * size + spec.nope_dim))
        ]
        query = f"{prefix}.q_proj.weight" if rank is None else f"{prefix}.q_b_proj.weight"
        self.q = query_in.fused_matrix({query: spec.num_heads * size}, rows, "heads")
        kv_rows = [Rows(0, 0, spec.kv_lora_rank), *_rotated(spec, spec.kv_lora_rank)]
        self.kv_a = declare.fused_matrix({f"{prefix}.kv_a_proj_with_mqa.weight": spec.head_dim}, kv_rows, "latent")
        self.kv_a_norm = declare.norm(f"{prefix}.kv_a_layernorm.weight", _NORM, spec.kv_lora_rank, "latent")
        self.up_k = _up_projection(spec, declare, prefix, 0, spec.nope_dim)
        self.up_v = _up_projection(spec, declare, prefix, spec.nope_dim, spec.v_dim)
        self.o = declare.matrix(f"{prefix}.o_proj.weight", spec.num_heads * spec.v_dim, "heads")

    def __call__(self, x: jax.Array, context: StepContext, attend: BoundAttend) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv)."""
        spec, num_tokens = self.spec, len(x)
        cos, sin = context.cos_sin(spec)
        q = x
        if self.q_a is not None and self.q_a_norm is not None:
            q = rms_norm(linear(x, self.q_a), self.q_a_norm[...], _NORM.eps)
        q_nope, q_rope = jnp.split(linear(q, self.q).reshape(num_tokens, self.num_heads, -1), [spec.nope_dim], axis=-1)
        latent, k_rope = jnp.split(linear(x, self.kv_a), [spec.kv_lora_rank], axis=-1)
        latent = rms_norm(latent, self.kv_a_norm[...], _NORM.eps)
        with jax.named_scope("rope"):
            q_rope, k_rope = apply_rope(q_rope, cos, sin), apply_rope(k_rope[:, None], cos, sin)[:, 0]
        q, rows = jnp.concatenate([q_nope, q_rope], axis=-1), jnp.concatenate([latent, k_rope], axis=-1)
        by_head = (self.num_heads, -1, spec.kv_lora_rank)
        projections = Projections(self.up_k[...].reshape(by_head), self.up_v[...].reshape(by_head))
        with jax.named_scope("attend"):
            values, kv = attend(LatentInputs(q, rows, projections))
        return sum_shards(linear(values.reshape(num_tokens, -1), self.o), context), kv


def _rotated(spec: LatentAttentionSpec, start: int) -> list[Rows]:
    """The rotated part of a head that begins at row `start`, in the order that is rotated."""
    return [Rows(0, start + part.start, len(part), part.step) for part in spec.rope.head_order(spec.rope_dim)]


def _up_projection(spec: LatentAttentionSpec, declare: Declare, prefix: str, start: int, count: int) -> nnx.Param[Any]:
    """[heads * count, L]: of each head's rows in kv_b_proj `count` from `start` on. In the model's type whatever the others
    are: they are a small part, and products with them sum over either axis."""
    size, heads = spec.nope_dim + spec.v_dim, spec.num_heads
    source = Source(
        (f"{prefix}.kv_b_proj.weight",),
        ((heads * size, spec.kv_lora_rank),),
        tuple(Rows(0, head * size + start, count) for head in range(heads)),
        transposed=False,
    )
    shape = (heads * count, spec.kv_lora_rank)
    return nnx.Param(ArrayInfo(shape, declare.dtype, ("heads", "latent"), source, std=spec.kv_lora_rank**-0.5))
