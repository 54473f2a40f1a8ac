"""What mixers with states share: their arrays, and what each shard has of groups of heads."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxserve.kernels.pages import PageArray
from jaxserve.models.specs import GatedDeltaNetSpec, StateMixer

States: TypeAlias = dict[str, Any]


def state_arrays(spec: StateMixer, dtype: Any, tp_size: int) -> dict[str, PageArray]:
    """One sequence's state of one layer, on one shard: what the convolution has seen last, and a matrix for each head."""
    before = spec.conv_size - 1
    if isinstance(spec, GatedDeltaNetSpec):
        heads = spec.num_value_heads // tp_size
        channels = (2 * spec.key_dim + spec.group_size * spec.value_dim) * spec.num_key_heads // tp_size
        return {
            "conv": PageArray((before, channels), dtype, 1),
            "heads": PageArray((heads, spec.key_dim, spec.value_dim), jnp.float32, 0),
        }
    return {
        "conv": PageArray((before, spec.inner_size // tp_size), dtype, 1),
        "conv_bc": PageArray((before, 2 * spec.num_groups * spec.state_dim), dtype, None),
        "heads": PageArray((spec.num_heads // tp_size, spec.state_dim, spec.head_dim), jnp.float32, 0),
    }


def state_bytes(spec: StateMixer, dtype: Any, tp_size: int) -> int:
    """Of that, on one shard."""
    return sum(array.nbytes for array in state_arrays(spec, dtype, tp_size).values())


def log_decay(a_log: jax.Array, step: jax.Array) -> jax.Array:
    """-exp(A_log) times a time step, float32."""
    return -jnp.exp(a_log.astype(jnp.float32)) * step
