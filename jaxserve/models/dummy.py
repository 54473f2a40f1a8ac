"""Random weights from the config alone (`--load-format dummy`): for benchmarks and tests without a checkpoint.

Drawn on the devices, each its shard. The same seed gives the same model on any number of devices. Sizes are such that
activations stay of order 1 through the layers and tokens differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.models.config import ModelConfig
from jaxserve.models.layouts import spread
from jaxserve.models.params import ArrayInfo, ParamTree, abstract_params, map_named


def dummy_params(
    config: ModelConfig, arrays: ParamTree, mesh: Mesh, seed: int, advance: Callable[[int], Any] = lambda _bytes: None
) -> ParamTree:
    """The tree `arrays` describes. `advance` is called with the bytes of every finished array."""
    programs: dict[Any, Any] = {}

    def make(name: str, single: ArrayInfo, info: ArrayInfo) -> jax.Array:
        kind = (single.shape, info.shape, info.logical_axes, info.mean, info.std)
        if kind not in programs:
            programs[kind] = _program(config, single, info, mesh)
        key = jax.random.fold_in(jax.random.key(seed), np.uint32(zlib.crc32(name.encode())))
        array = programs[kind](key)
        advance(info.num_bytes)
        return array

    single_device = abstract_params(config, arrays["final_norm"].dtype, 1)
    return jax.block_until_ready(map_named(make, single_device, arrays))


def _program(config: ModelConfig, single: ArrayInfo, info: ArrayInfo, mesh: Mesh) -> Any:
    def draw(key: jax.Array) -> jax.Array:
        values = info.mean + info.std * jax.random.normal(key, single.shape, jnp.float32)
        return spread(values, info, config).astype(info.dtype)

    return jax.jit(draw, out_shardings=NamedSharding(mesh, info.spec))
