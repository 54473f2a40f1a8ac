"""ArrayPrograms: the compiled functions of `array_making` for one mesh, each of them once.

Arrays that are on the mesh's devices are taken as they are divided there, and XLA moves what must be moved. Those of as many
other devices first come over shard for shard. For the rest XLA says how it would have them; so it does for what it would bring
to every device whole on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.models.array_making import SlotArray, WholeArray
from jaxserve.models.arrays import ALL_AXES
from jaxserve.models.redistribute import blocks_of, devices_of

_LARGE_BYTES = 1 << 20  # what has more is not brought to every device whole where it divides evenly
_MOST_TEMPORARY = 0.75  # of the bytes that are given; what a device needs to exchange shards is half of them at most


class Program(NamedTuple):
    """For given arrays of a kind."""

    shardings: list[Sharding]  # that it takes
    run: Callable[[jax.Array | None, list[jax.Array]], jax.Array] | None  # None: its result is the only array that it takes


class ArrayPrograms:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._devices = tuple(mesh.devices.flat)
        self._programs: dict[Hashable, Any] = {}

    def of_slots(self, make: SlotArray, spec: PartitionSpec, old: jax.Array | None) -> Any:
        """Compiled when it is called: of `old` and of arrays that are where `make` wants them."""
        key = (make, old is not None)
        if key not in self._programs:
            self._programs[key] = self._jitted(make, spec, old)
        return self._programs[key]

    def of_whole(
        self, make: WholeArray, spec: PartitionSpec, arrays: Sequence[jax.Array | np.ndarray], old: jax.Array | None
    ) -> Program:
        """For arrays like these in the place of `old`, which is of the result's kind."""
        target = NamedSharding(self._mesh, spec)
        shardings = tuple(self._as_here(array, target) for array in arrays)
        are_here = all(isinstance(array, jax.Array) and devices_of(array) == self._devices for array in arrays)
        shapes = tuple((array.shape, jax.dtypes.canonicalize_dtype(array.dtype)) for array in arrays)
        key = (make, old is not None, shapes, shardings, are_here)
        if key not in self._programs:
            described = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
            known = [sharding for sharding in shardings if sharding is not None]
            program = None
            if len(known) == len(arrays):
                comes_finished = not are_here and make.only_moves(described) and _are_alike(known[0], target, arrays[0].shape)
                program = Program([target], None) if comes_finished else self._of_mesh(make, spec, described, known, old)
            self._programs[key] = program or self._of_others(make, spec, described, old)
        found: Program = self._programs[key]
        return found

    def _as_here(self, array: jax.Array | np.ndarray, target: Sharding) -> Sharding | None:
        """Of the mesh's devices, with the same shards; None if it can't have them, or shouldn't."""
        if isinstance(array, np.ndarray):
            return None
        devices = devices_of(array)
        if devices == self._devices:
            return array.sharding
        if len(devices) != len(self._devices) or not set(devices).isdisjoint(self._devices):
            return None
        has_copies = math.prod(array.sharding.shard_shape(array.shape)) * len(devices) > array.size
        is_too_much = has_copies and array.nbytes > _LARGE_BYTES and not target.is_fully_replicated
        return None if is_too_much else _on(self._devices, array.sharding)

    def _jitted(self, make: WholeArray | SlotArray, spec: PartitionSpec, old: jax.Array | None) -> Any:
        donated = () if old is None else (0,)
        return jax.jit(make, out_shardings=NamedSharding(self._mesh, spec), donate_argnums=donated, keep_unused=True)

    def _of_mesh(
        self,
        make: WholeArray,
        spec: PartitionSpec,
        shapes: Sequence[jax.ShapeDtypeStruct],
        shardings: list[Sharding],
        old: jax.Array | None,
    ) -> Program | None:
        """None if XLA would bring large arrays to every device, though the result is divided."""
        given = [_divided(shape, sharding) for shape, sharding in zip(shapes, shardings, strict=True)]
        compiled = self._jitted(make, spec, old).lower(_kind(old), given).compile()
        num_bytes, memory = sum(map(_bytes, shapes)), compiled.memory_analysis()
        matters = num_bytes > _LARGE_BYTES and not NamedSharding(self._mesh, spec).is_fully_replicated
        is_gathered = memory is not None and memory.temp_size_in_bytes > _MOST_TEMPORARY * num_bytes
        return None if matters and is_gathered else Program(shardings, compiled)

    def _of_others(
        self, make: WholeArray, spec: PartitionSpec, shapes: Sequence[jax.ShapeDtypeStruct], old: jax.Array | None
    ) -> Program:
        if make.only_moves(shapes):
            return Program([NamedSharding(self._mesh, spec)], None)
        jitted = self._jitted(make, spec, old)
        # Nothing is said of how the arrays are divided: XLA follows the result's sharding back to them.
        compiled = jitted.lower(_kind(old), list(shapes)).compile()
        wanted = [self._instead(sharding, shape) for sharding, shape in zip(_of_arrays(compiled), shapes, strict=True)]
        if any(sharding is not None for sharding in wanted):
            divided = [_divided(shape, sharding) for shape, sharding in zip(shapes, wanted, strict=True)]
            compiled = jitted.lower(_kind(old), divided).compile()
        return Program(_of_arrays(compiled), compiled)

    def _instead(self, sharding: Sharding, shape: jax.ShapeDtypeStruct) -> NamedSharding | None:
        """Of one that cannot be had, or that would bring much to every device; None: it stays."""
        if _divides(sharding, shape.shape) and not (sharding.is_fully_replicated and _bytes(shape) > _LARGE_BYTES):
            return None
        even = [axis for axis, size in enumerate(shape.shape) if size % self._mesh.size == 0]
        if not even:
            return NamedSharding(self._mesh, PartitionSpec())
        longest = max(even, key=lambda axis: shape.shape[axis])
        return NamedSharding(self._mesh, PartitionSpec(*[None] * longest, ALL_AXES))


@functools.lru_cache(maxsize=256)
def _on(devices: tuple[jax.Device, ...], sharding: Sharding) -> Sharding | None:
    """The same of as many other devices."""
    if len(devices) == 1:
        return NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = sharding.mesh
    return NamedSharding(Mesh(np.array(devices).reshape(mesh.devices.shape), mesh.axis_names), sharding.spec)


def _are_alike(one: Sharding, other: Sharding, shape: tuple[int, ...]) -> bool:
    return blocks_of(one, shape) == blocks_of(other, shape)


def _kind(array: jax.Array | None) -> jax.ShapeDtypeStruct | None:
    return None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _divided(shape: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return shape if sharding is None else jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(shape.shape)) * shape.dtype.itemsize


def _of_arrays(compiled: Any) -> list[Sharding]:
    """How the given arrays are divided for a program."""
    (_, shardings), _ = compiled.input_shardings
    return list(shardings)


def _divides(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
