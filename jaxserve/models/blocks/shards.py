"""The collective that ends a block of attention, or another mixer."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.models.arrays import TENSOR_AXIS


def sum_shards(x: jax.Array, bias: Any = None) -> jax.Array:
    """Adds up the partial results of the devices that share the tokens, and the bias (a parameter) once."""
    whole = jax.lax.psum(x, TENSOR_AXIS)
    return whole if bias is None else whole + bias[...]
