"""A decoder layer: attention and MLP, with the norms around them, on the residual stream."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve.models.blocks.attention import BoundAttend, SelfAttention
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.mlp import DenseMLP
from jaxserve.models.blocks.moe import MoE
from jaxserve.models.blocks.norm import norm
from jaxserve.models.context import StepContext
from jaxserve.models.specs import LayerSpec, MoESpec


class DecoderLayer(nnx.Module):
    def __init__(self, spec: LayerSpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        # In checkpoints post_attention_layernorm is the norm behind the attention if there is one, else the one before the MLP.
        after, behind = spec.norms_outputs, f"{prefix}.post_attention_layernorm.weight"
        self.attn_norm = declare.norm(f"{prefix}.input_layernorm.weight", spec.norm)
        self.attn = SelfAttention(spec.attention, declare, f"{prefix}.self_attn")
        self.attn_out_norm = declare.norm(behind, spec.norm) if after else None
        self.mlp_norm = declare.norm(f"{prefix}.pre_feedforward_layernorm.weight" if after else behind, spec.norm)
        mlp = f"{prefix}.mlp"
        self.mlp = MoE(spec.mlp, declare, mlp) if isinstance(spec.mlp, MoESpec) else DenseMLP(spec.mlp, declare, mlp)
        self.mlp_out_norm = declare.norm(f"{prefix}.post_feedforward_layernorm.weight", spec.norm) if after else None

    def __call__(self, x: jax.Array, context: StepContext, attend: BoundAttend) -> tuple[jax.Array, Any]:
        """x [T, hidden] -> ([T, hidden], kv)."""
        with jax.named_scope("attention"):
            out, kv = self.attn(norm(x, self.attn_norm, self.spec.norm), context, attend)
            x = x + self._normed(out, self.attn_out_norm)
        with jax.named_scope("mlp"):
            out = self.mlp(norm(x, self.mlp_norm, self.spec.norm), context)
            return x + self._normed(out, self.mlp_out_norm), kv

    def _normed(self, out: jax.Array, weight: Any) -> jax.Array:
        return out if weight is None else norm(out, weight, self.spec.norm)
