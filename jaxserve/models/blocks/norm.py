"""Root-mean-square norms of the hidden state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.rotary import rms_norm
from jaxserve.models.specs import NormSpec


def norm(x: jax.Array, weight: Any, spec: NormSpec) -> jax.Array:
    """x [..., D] normed over the last axis; `weight` is a parameter [D]."""
    if not spec.counts_from_one:
        return rms_norm(x, weight[...], spec.eps)
    return rms_norm(x.astype(jnp.float32), factors(weight, spec, jnp.float32), spec.eps).astype(x.dtype)


def factors(weight: Any, spec: NormSpec, dtype: Any) -> jax.Array:
    """What a norm multiplies with, [D]."""
    stored = weight[...]
    return (1 + stored.astype(jnp.float32)).astype(dtype) if spec.counts_from_one else stored
