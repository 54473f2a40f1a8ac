"""A layer: a mixer (attention, or what keeps states) and MLP, with the norms around them, on the residual stream."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.blocks.attend import BoundAttend, Mixer
from jaxserve.models.blocks.attention import SelfAttention
from jaxserve.models.blocks.declare import Declare
from jaxserve.models.blocks.gated_delta_net import GatedDeltaNet
from jaxserve.models.blocks.latent_attention import LatentAttention
from jaxserve.models.blocks.mamba2 import Mamba2
from jaxserve.models.blocks.mlp import DenseMLP
from jaxserve.models.blocks.moe import MoE, Routed
from jaxserve.models.blocks.norm import norm
from jaxserve.models.context import StepContext
from jaxserve.models.specs import GatedDeltaNetSpec, LatentAttentionSpec, LayerSpec, Mamba2Spec, MoESpec


class DecoderLayer(nnx.Module):
    def __init__(self, spec: LayerSpec, declare: Declare, prefix: str) -> None:
        self.spec = spec
        # In checkpoints post_attention_layernorm is the norm behind the attention if there is one, else the one before the MLP.
        after, behind = spec.norms_outputs or spec.norms_sums, f"{prefix}.post_attention_layernorm.weight"
        before, norms_mlp_input = spec.norms_inputs and spec.norms_mixer_input, spec.norms_inputs and not spec.is_parallel
        self.attn_norm = declare.norm(f"{prefix}.input_layernorm.weight", spec.norm) if before else None
        self.attn = _mixer(spec.mixer, declare, prefix)
        self.attn_out_norm = declare.norm(behind, spec.norm) if after else None
        before_mlp = f"{prefix}.pre_feedforward_layernorm.weight" if after else behind
        self.mlp_norm = declare.norm(before_mlp, spec.norm) if norms_mlp_input else None
        mlp = f"{prefix}.mlp"
        self.mlp = MoE(spec.mlp, declare, mlp) if isinstance(spec.mlp, MoESpec) else DenseMLP(spec.mlp, declare, mlp)
        self.mlp_out_norm = declare.norm(f"{prefix}.post_feedforward_layernorm.weight", spec.norm) if after else None

    def __call__(self, x: jax.Array, context: StepContext, attend: BoundAttend) -> tuple[jax.Array, Any, Routed]:
        """x [T, hidden] -> ([T, hidden], kv, what is told of the choice of experts, if there are some)."""
        with jax.named_scope("attention"):
            read = self._normed(x, self.attn_norm)
            out, kv = self.attn(read, context, attend)
            x = self._sum(x, out, self.attn_out_norm)
        with jax.named_scope("mlp"):
            read, routed = read if self.spec.is_parallel else self._normed(x, self.mlp_norm), Routed()
            if isinstance(self.mlp, MoE):
                out, routed = self.mlp(read, context)
            else:
                out = self.mlp(read, context)
            return self._sum(x, out, self.mlp_out_norm), kv, routed

    def _normed(self, x: jax.Array, weight: Any) -> jax.Array:
        return x if weight is None else norm(x, weight, self.spec.norm)

    def _sum(self, x: jax.Array, out: jax.Array, weight: Any) -> jax.Array:
        """What was computed, added to the stream. `weight` is of the norm of one or the other, if there is one."""
        if self.spec.norms_sums:
            return self._normed(x + self._scaled(out), weight)
        return x + self._scaled(self._normed(out, weight))

    def _scaled(self, out: jax.Array) -> jax.Array:
        scale = self.spec.residual_scale
        return out if scale == 1.0 else out * jnp.asarray(scale, out.dtype)


def _mixer(spec: Mixer, declare: Declare, prefix: str) -> SelfAttention | LatentAttention | GatedDeltaNet | Mamba2:
    if isinstance(spec, GatedDeltaNetSpec):
        return GatedDeltaNet(spec, declare, f"{prefix}.linear_attn")
    if isinstance(spec, Mamba2Spec):
        return Mamba2(spec, declare, f"{prefix}.mamba")
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttention(spec, declare, f"{prefix}.self_attn")
    return SelfAttention(spec, declare, f"{prefix}.self_attn")
