"""Assembly: turns the arrays of a checkpoint, one by one as they arrive on the mesh, into a model's tree of parameters.

Knows which are computed from others (`Derived`), and frees those as soon as they have been used; not where arrays come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.models.arrays import ArrayInfo, Derived, Given
from jaxserve.models.decoder import ParamTree
from jaxserve.models.names import map_named, stored_arrays, stored_name


class Assembly:
    """`take` may be called from several threads, once per array of `stored`."""

    def __init__(self, arrays: ParamTree, mesh: Mesh, advance: Callable[[int], Any]) -> None:
        """`advance` is called with the bytes of every finished array."""
        self.stored: dict[str, ArrayInfo] = stored_arrays(arrays)
        self._arrays = arrays
        self._mesh = mesh
        self._advance = advance
        self._finished: dict[str, jax.Array] = {}
        self._made_of: dict[str, list[tuple[str, ArrayInfo]]] = {name: [] for name in self.stored}
        map_named(self._enter, arrays)

    def _enter(self, name: str, info: ArrayInfo) -> None:
        if isinstance(info.source, Given):
            self._finished[name] = give(info, info.source, self._mesh)
            self._advance(info.num_bytes)
        else:
            self._made_of[stored_name(name, info)].append((name, info))

    def take(self, name: str, array: jax.Array) -> None:
        """`array` is `stored[name]` on the mesh."""
        for made, info in self._made_of[name]:
            if isinstance(info.source, Derived):
                self._finished[made] = derive(info, info.source, array, self._mesh)
            else:
                self._finished[made] = array
            self._advance(info.num_bytes)
        if name not in self._finished:
            array.delete()

    def params(self) -> ParamTree:
        """The tree; every stored array must have been taken."""
        params: ParamTree = map_named(lambda name, _: self._finished[name], self._arrays)
        return params


def give(info: ArrayInfo, source: Given, mesh: Mesh) -> jax.Array:
    """The array of numbers that no checkpoint has."""
    return jax.device_put(np.array(source.values, info.dtype).reshape(info.shape), NamedSharding(mesh, info.spec))


def derive(info: ArrayInfo, source: Derived, base: jax.Array, mesh: Mesh) -> jax.Array:
    """The array that is computed from `base`, finished."""
    made = jax.jit(source.compute, out_shardings=NamedSharding(mesh, info.spec))(base)
    assert (made.shape, made.dtype) == (info.shape, info.dtype), (made.shape, made.dtype, info)
    return jax.block_until_ready(made)
