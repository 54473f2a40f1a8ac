"""From the devices where somebody's arrays are to ours, whatever the shardings of both: device to device.

Where both sides have the same shards `jax.device_put` does it, for many arrays at once. Elsewhere it would go through the host:
here shards are cut into pieces that are whole on both sides, each is copied once to each device that needs it, and put together
there. What lies on the right device is not copied. Cutting and putting together are one program for all devices, and for all
arrays of a shape.

Devices of a CPU have one memory: what may be shared is not copied there.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

Bounds: TypeAlias = tuple[tuple[int, int], ...]  # per axis, [start, stop)
Shape: TypeAlias = tuple[int, ...]

_FLAT = PartitionSpec("device")  # of an array that is the shards of another one below the other


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of an array that a device is to have."""

    array: jax.Array
    bounds: Bounds


def redistribute(
    arrays: Sequence[jax.Array | np.ndarray], shardings: Sequence[Sharding], *, fresh: Sequence[bool]
) -> list[jax.Array]:
    """The same elements with these shardings, which must divide the shapes. Buffers that are on the right device already are
    shared with the arrays, unless they must be `fresh`."""
    moved: dict[int, jax.Array] = {}
    put: dict[bool, dict[int, jax.Array | np.ndarray]] = {True: {}, False: {}}  # by whether JAX must copy
    for number, (array, sharding, is_fresh) in enumerate(zip(arrays, shardings, fresh, strict=True)):
        if isinstance(array, np.ndarray):
            put[False][number] = array.copy() if is_fresh else array  # whose memory JAX may keep, whatever it is asked
            continue
        if array.sharding == sharding and not is_fresh:
            moved[number] = array
            continue
        blocks, theirs = blocks_of(sharding, array.shape), blocks_of(array.sharding, array.shape)
        is_alike, is_here = [*blocks.values()] == [*theirs.values()], [*blocks] == [*theirs]
        if is_alike and not is_here and not is_fresh and _is_on_cpu(array):
            moved[number] = _shared(array, sharding)
        elif is_alike and (is_here or blocks.keys() != theirs.keys()):
            put[is_fresh][number] = array
        else:
            shards = bring({device: Block(array, bounds) for device, bounds in blocks.items()}, fresh=is_fresh)
            moved[number] = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    for is_fresh, held in put.items():
        if not held:
            continue
        targets = [shardings[number] for number in held]
        moved |= zip(held, jax.device_put([*held.values()], targets, may_alias=False if is_fresh else None), strict=True)
    return [moved[number] for number in range(len(arrays))]


def _shared(array: jax.Array, sharding: Sharding) -> jax.Array:
    """On other devices of the CPU, which have the same shards."""
    blocks = blocks_of(array.sharding, array.shape)
    held = {blocks[shard.device]: np.asarray(shard.data) for shard in array.addressable_shards}
    return jax.make_array_from_callback(array.shape, sharding, lambda index: held[_bounds(index, array.shape)])


def plain(array: jax.Array) -> jax.Array:
    """The same buffers as an array whose type says nothing of its mesh, as types of an explicit one do: how programs divide it
    is XLA's business. What is in the host's memory comes to its devices."""
    sharding = array.sharding
    device: Any = next(iter(sharding.device_set))
    default = device.default_memory().kind
    if sharding.memory_kind not in (None, default):
        array = jax.device_put(array, sharding.with_memory_kind(default))
        sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) == {AxisType.Auto}:
        return array
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, sharding.spec), shards)


def devices_of(array: jax.Array) -> tuple[jax.Device, ...]:
    """In the order that programs over them know."""
    return tuple(blocks_of(array.sharding, array.shape))


@functools.lru_cache(maxsize=1024)
def blocks_of(sharding: Sharding, shape: Shape) -> Mapping[jax.Device, Bounds]:
    """What each device has, in that order."""
    return {device: _bounds(index, shape) for device, index in sharding.devices_indices_map(shape).items()}


def _bounds(index: Sequence[slice] | None, shape: Shape) -> Bounds:
    assert index is not None
    return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def bring(wanted: Mapping[jax.Device, Block], *, fresh: bool = False) -> list[jax.Array]:
    """Each device's block, of one size for all, as arrays of single devices in the order of `wanted`."""
    (size,) = {_size(block.bounds) for block in wanted.values()}
    arrays = {id(block.array): block.array for block in wanted.values()}
    unit = functools.reduce(_common, (array.sharding.shard_shape(array.shape) for array in arrays.values()), size)
    pieces = {key: _pieces(array, unit) for key, array in arrays.items()}
    sources, targets = [], []
    for number, (device, block) in enumerate(wanted.items()):
        for start in itertools.product(*(range(*bounds, step) for bounds, step in zip(block.bounds, unit, strict=True))):
            sources.append(_nearest(pieces[id(block.array)][start], device, number))
            targets.append(device)
    copies = fresh and unit == size
    held: Sequence[Any] = sources
    if not copies and all(map(_is_on_cpu, sources)):
        held = [np.asarray(source) for source in sources]  # the same memory, which CPU devices have in common
    moved = jax.device_put(held, targets, may_alias=False if copies else None)
    grid = tuple(whole // part for whole, part in zip(size, unit, strict=True))
    return moved if unit == size else _put_together(moved, tuple(wanted), grid)


def _is_on_cpu(array: jax.Array) -> bool:
    device: Any = next(iter(array.sharding.device_set))
    return bool(device.platform == "cpu")


def _size(bounds: Bounds) -> Shape:
    return tuple(stop - start for start, stop in bounds)


def _common(one: Shape, other: Shape) -> Shape:
    """Of the largest pieces that neither side's borders cut."""
    return tuple(map(math.gcd, one, other))


def _pieces(array: jax.Array, unit: Shape) -> dict[Shape, list[jax.Array]]:
    """By where in the array they begin; several where several devices have it."""
    bounds = blocks_of(array.sharding, array.shape)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    found = collections.defaultdict(list)
    shard_size = array.sharding.shard_shape(array.shape)
    if shard_size == unit:
        for device, data in shards.items():
            found[tuple(start for start, _ in bounds[device])].append(data)
        return found
    mesh = Mesh(np.array(list(bounds)), ("device",))
    flat = _joined([shards[device] for device in bounds], mesh)
    steps = [range(0, whole, part) for whole, part in zip(shard_size, unit, strict=True)]
    for offset, piece in zip(itertools.product(*steps), _cut(flat, unit, mesh), strict=True):
        for shard in piece.addressable_shards:
            found[tuple(start + add for (start, _), add in zip(bounds[shard.device], offset, strict=True))].append(shard.data)
    return found


def _nearest(copies: Sequence[jax.Array], device: jax.Device, number: int) -> jax.Array:
    """One that the device has itself; else the devices that have it take turns."""
    here = [copy for copy in copies if copy.devices() == {device}]
    return here[0] if here else copies[number % len(copies)]


def _put_together(pieces: Sequence[jax.Array], devices: Sequence[jax.Device], grid: Shape) -> list[jax.Array]:
    """`pieces` of one device after the other, each device's as a grid of that shape."""
    mesh, per_device = Mesh(np.array(devices), ("device",)), math.prod(grid)
    columns = [_joined(pieces[place::per_device], mesh) for place in range(per_device)]
    shards = {shard.device: shard.data for shard in _assemble(columns, grid, mesh).addressable_shards}
    return [shards[device] for device in devices]


def _joined(shards: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """One below the other, each where it is."""
    first, *others = shards[0].shape
    sharding = NamedSharding(mesh, _FLAT)
    return jax.make_array_from_single_device_arrays((len(shards) * first, *others), sharding, shards)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(flat: jax.Array, unit: Shape, mesh: Mesh) -> list[jax.Array]:
    def cut(shard: jax.Array) -> list[jax.Array]:
        steps = [range(0, whole, part) for whole, part in zip(shard.shape, unit, strict=True)]
        return [
            jax.lax.slice(shard, start, [begin + part for begin, part in zip(start, unit, strict=True)])
            for start in itertools.product(*steps)
        ]

    return jax.shard_map(cut, mesh=mesh, in_specs=_FLAT, out_specs=_FLAT)(flat)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _assemble(columns: Sequence[jax.Array], grid: Shape, mesh: Mesh) -> jax.Array:
    def assemble(pieces: Sequence[jax.Array]) -> jax.Array:
        parts = list(pieces)
        for axis in reversed(range(len(grid))):
            parts = [jnp.concatenate(parts[start : start + grid[axis]], axis) for start in range(0, len(parts), grid[axis])]
        (whole,) = parts
        return whole

    return jax.shard_map(assemble, mesh=mesh, in_specs=(_FLAT,), out_specs=_FLAT)(columns)
