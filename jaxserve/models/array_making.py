"""The functions that make an array of ours of given ones, each a value: equal for all arrays that one program can make.

They are what `ArrayPrograms` compiles. What was in the array's memory is their first argument, and not read: it is there to be
written over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models.arrange import arrange, arrange_stack
from jaxserve.models.arrays import ALL_AXES, ArrayInfo, Source

Compute: TypeAlias = Callable[[jax.Array], jax.Array] | None


@dataclasses.dataclass(frozen=True)
class WholeArray:
    """The function that makes an array of a kind: equal for those that one program makes."""

    info: ArrayInfo
    source: Source
    computes: tuple[Compute, ...]
    num_shards: int
    of_each: bool  # computes are of each matrix of a stack

    def __call__(self, old: jax.Array | None, arrays: list[jax.Array]) -> jax.Array:
        made = self.of(arrays)
        return jnp.copy(made) if made is arrays[0] else made  # else JAX gives back the very array that it was given

    def of(self, arrays: list[jax.Array]) -> jax.Array:
        computes = [jax.vmap(compute) if self.of_each and compute is not None else compute for compute in self.computes]
        tensors = _computed(arrays, computes)
        if "experts" in self.info.logical_axes:
            return arrange_stack(tensors, self.source, self.info)
        return arrange(tensors, self.source, self.info, self.num_shards)

    def only_moves(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> bool:
        """Whether the result is the only array: what is transposed is transposed back."""
        if len(shapes) > 1:
            return False
        traced = jax.make_jaxpr(self.of)(list(shapes)).jaxpr
        (last,), axes = traced.invars, tuple(range(len(shapes[0].shape)))
        for equation in traced.eqns:
            if equation.primitive.name != "transpose" or equation.invars != [last]:
                return False
            axes = tuple(axes[axis] for axis in equation.params["permutation"])
            (last,) = equation.outvars
        return traced.outvars == [last] and axes == tuple(range(len(axes)))


@dataclasses.dataclass(frozen=True)
class SlotArray:
    """The same for an array of experts: each device makes its slots of what it has."""

    mesh: Mesh
    info: ArrayInfo
    spec: PartitionSpec
    by_device: tuple[tuple[Source, ...], ...]  # of each slot
    computes: tuple[tuple[Compute, ...], ...]  # of each slot of any device

    def __call__(self, old: jax.Array | None, columns: list[list[jax.Array]]) -> jax.Array:
        kinds = list(dict.fromkeys(self.by_device))
        kind_of_device = np.array([kinds.index(kind) for kind in self.by_device], np.int32)

        def make(columns: list[list[jax.Array]]) -> jax.Array:
            tensors = [_computed(arrays, computes) for arrays, computes in zip(columns, self.computes, strict=True)]
            branches = [functools.partial(self._stack, kind) for kind in kinds]
            if len(kinds) == 1:
                return branches[0](tensors)
            kind = jnp.asarray(kind_of_device)[jax.lax.axis_index(ALL_AXES)]
            stack: jax.Array = jax.lax.switch(kind, branches, tensors)
            return stack

        every = PartitionSpec(ALL_AXES)
        return jax.shard_map(make, mesh=self.mesh, in_specs=(every,), out_specs=self.spec, check_vma=False)(columns)

    def _stack(self, sources: tuple[Source, ...], tensors: list[list[jax.Array]]) -> jax.Array:
        slots = [arrange(of_slot, source, self.info, 1) for of_slot, source in zip(tensors, sources, strict=True)]
        return jnp.stack(slots)


def _computed(arrays: Sequence[jax.Array], computes: Sequence[Compute]) -> list[jax.Array]:
    return [array if compute is None else compute(array) for array, compute in zip(arrays, computes, strict=True)]
