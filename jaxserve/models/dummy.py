"""Random weights from the config alone (`--load-format dummy`): for benchmarks and tests without a checkpoint.

Every device computes its shard, as a function of the seed, the array's name and the element's place. So the same seed gives the
same model on any number of devices and any platform. Sizes are such that activations stay of order 1 through the layers and
tokens differ.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.models.arrays import ArrayInfo
from jaxserve.models.layouts import spread


def make_dummy(
    single: Mapping[str, ArrayInfo],
    stored: Mapping[str, ArrayInfo],
    mesh: Mesh,
    seed: int,
    take: Callable[[str, jax.Array], None],
) -> None:
    """Gives `take` every array of `stored` by name; `single` describes the same arrays for one device."""
    tp_size = mesh.size
    for name, info in stored.items():
        array_seed = zlib.crc32(f"{seed} {name}".encode())
        draw = jax.jit(_draw, static_argnums=(3, 4, 5), out_shardings=NamedSharding(mesh, info.spec))
        numbers = np.uint32(array_seed), np.float32(info.mean), np.float32(info.std)
        take(name, draw(*numbers, single[name].shape, info.anonymous, tp_size))


def _draw(
    seed: jax.Array, mean: jax.Array, std: jax.Array, single_shape: tuple[int, ...], info: ArrayInfo, tp_size: int
) -> jax.Array:
    """Static but for the first three: one program for all arrays of a kind."""
    return spread(mean + std * _normal(seed, single_shape), info, tp_size).astype(info.dtype)


def _normal(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32, nearly normal: the sum of a hash's four bytes. Compiles in a tenth of the time of jax.random.normal."""
    bits = seed
    for axis in range(len(shape)):
        bits = _mix(bits + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(0x9E3779B9))
    total = sum(((bits >> shift) & 0xFF).astype(jnp.float32) for shift in (0, 8, 16, 24))
    return jnp.asarray((total - 4 * 127.5) / math.sqrt(4 * (256**2 - 1) / 12))


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of uint32 whose output bits depend on all input bits (MurmurHash3's finalizer)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
