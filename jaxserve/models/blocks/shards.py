"""The collective that ends a block of attention, or another mixer."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.models.arrays import TENSOR_AXIS
from jaxserve.models.context import StepContext
from jaxserve.models.exchange import add_up


def sum_shards(x: jax.Array, context: StepContext, bias: Any = None) -> jax.Array:
    """Adds up the partial results of the devices that share the tokens, and the bias (a parameter) once."""
    whole = add_up(x, TENSOR_AXIS, in_order=context.batch_invariant)
    return whole if bias is None else whole + bias[...]
