"""The collective that ends a block."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.models.arrays import TENSOR_AXIS


def sum_shards(x: jax.Array, bias: Any = None) -> jax.Array:
    """Adds up the shards' partial results, and the bias (a parameter) once."""
    whole = jax.lax.psum(x, TENSOR_AXIS)
    return whole if bias is None else whole + bias[...]
