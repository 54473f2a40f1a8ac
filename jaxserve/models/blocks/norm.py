"""Norms of the hidden state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.rotary import rms_norm
from jaxserve.models.specs import NormSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaleAndBias:
    """What the parameter of a norm with a bias holds."""

    scale: Any  # [D]
    bias: Any  # [D]


def norm(x: jax.Array, weight: Any, spec: NormSpec) -> jax.Array:
    """x [..., D] normed over the last axis; `weight` is a parameter of `Declare.norm`."""
    if spec.subtracts_mean:
        return layer_norm(x, weight, spec)
    if not spec.counts_from_one:
        return rms_norm(x, weight[...], spec.eps)
    return rms_norm(x.astype(jnp.float32), factors(weight, spec, jnp.float32), spec.eps).astype(x.dtype)


def layer_norm(x: jax.Array, weight: Any, spec: NormSpec) -> jax.Array:
    """The same for a layer norm, whose weights may have more axes, as x has."""
    held = weight.get_value()
    scale, bias = (held.scale, held.bias) if spec.bias else (held, 0)
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + spec.eps)
    return (wide * (scale.astype(jnp.float32) + spec.counts_from_one) + bias).astype(x.dtype)


def factors(weight: Any, spec: NormSpec, dtype: Any) -> jax.Array:
    """What a norm multiplies with, [D]."""
    stored = weight[...]
    return (1 + stored.astype(jnp.float32)).astype(dtype) if spec.counts_from_one else stored
