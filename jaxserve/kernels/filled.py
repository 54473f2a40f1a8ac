"""Arrays of one value that a step's later operations write into."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.typing


def filled(shape: tuple[int, ...], value: float, after: jax.Array) -> jax.Array:
    """float32, made once `after` is there. A constant would be the same in every layer: XLA for GPUs makes those of all layers
    in one kernel at the beginning of the step, and each of them takes memory until its layer is done."""
    one, _ = jax.lax.optimization_barrier((jnp.float32(value), after))
    return jnp.broadcast_to(one, shape)
