"""Exchange: between tokens as attention has them and tokens as MLPs, experts and the vocabulary want them.

Where attention is divided by tensor parallelism alone every device has all tokens of a step, and blocks end in a sum. With
attention by data parallelism each shard, a place along the mesh's "data", has tokens of its own: what is sharded over all
devices brings those of all shards together first, and its sum goes back in parts. Two ways, SGLang's padding modes: every shard
sends as many tokens as the fullest may have (`GatherAll`), which costs least where shards are about equally full; or tokens lie
one behind the other in a common buffer, which is summed (`PackAll`), for steps that would be mostly padding.

D shards, T token slots of one, A of all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxserve.models.arrays import ALL_AXES, DATA_AXIS, TENSOR_AXIS


class Exchange(Protocol):
    def gather(self, x: jax.Array) -> jax.Array:
        """[T, ...] of this shard -> [A, ...], those of all shards, alike on all devices. Slots without a token are 0 in it, or
        whatever they were."""
        ...

    def sum_own(self, partial: jax.Array, bias: Any = None) -> jax.Array:
        """Each device's part of a result for all tokens [A, ...] -> the sum [T, ...] for this shard's, plus the bias (a
        parameter) once."""
        ...


def add_up(x: jax.Array, axes: Any, *, in_order: bool) -> jax.Array:
    """The sum of the devices' x along mesh axes. `in_order`: each number is added up in the devices' order; all-reduces divide
    the array among the devices, and each part begins with another one's."""
    if not in_order or jax.lax.axis_size(axes) == 1:
        return jax.lax.psum(x, axes)
    parts = jax.lax.all_gather(x, axes).astype(jnp.float32)
    return functools.reduce(jnp.add, list(parts)).astype(x.dtype)


def _plus(x: jax.Array, bias: Any) -> jax.Array:
    return x if bias is None else x + bias[...]


@dataclasses.dataclass(frozen=True)
class AllHere:
    """Every device has all tokens."""

    in_order: bool = False  # of `add_up`

    def gather(self, x: jax.Array) -> jax.Array:
        return x

    def sum_own(self, partial: jax.Array, bias: Any = None) -> jax.Array:
        return _plus(add_up(partial, ALL_AXES, in_order=self.in_order), bias)


@dataclasses.dataclass(frozen=True)
class GatherAll:
    """The shards' slots one behind the other: A = D * T."""

    def pick(self, x: jax.Array) -> jax.Array:
        """Of what every device knows of all shards' slots, [D, T] -> [A]: as `gather` would bring them."""
        return x.reshape(-1)

    def gather(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("gather_shards"):
            return jax.lax.all_gather(x, DATA_AXIS, axis=0, tiled=True)

    def sum_own(self, partial: jax.Array, bias: Any = None) -> jax.Array:
        with jax.named_scope("scatter_shards"):
            own = jax.lax.psum_scatter(partial, DATA_AXIS, scatter_dimension=0, tiled=True)
        return _plus(jax.lax.psum(own, TENSOR_AXIS), bias)


@dataclasses.dataclass(frozen=True)
class PackAll:
    """The shards' tokens one behind the other, A slots for all of them together: A = T, as one shard may have them all."""

    first: jax.Array  # int32 []: the slot of this shard's first token among those of all
    is_live: jax.Array  # bool [T]: which slots hold a token, those in front
    order: jax.Array  # int32 [A]: which of the shards' slots [D * T] stand there

    @staticmethod
    def of(counts: jax.Array, shard: jax.Array, is_live: jax.Array) -> PackAll:
        """`counts` int32 [D]: tokens of each shard, together at most T."""
        slot = jnp.arange(len(is_live), dtype=jnp.int32)
        firsts = jnp.cumsum(counts, dtype=jnp.int32) - counts
        holder = jnp.sum(slot[:, None] >= firsts[None, 1:], axis=1, dtype=jnp.int32)
        return PackAll(firsts[shard], is_live, holder * len(is_live) + slot - firsts[holder])

    def pick(self, x: jax.Array) -> jax.Array:
        """As `GatherAll.pick`."""
        return x.reshape(-1)[self.order]

    def gather(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("pack_shards"):
            own = jnp.where(self.is_live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
            # Twice the room: so the update is never moved to fit.
            room = jnp.zeros((2 * len(x), *x.shape[1:]), x.dtype)
            placed = jax.lax.dynamic_update_slice_in_dim(room, own, self.first, axis=0)
            return jax.lax.psum(placed[: len(x)], DATA_AXIS)

    def sum_own(self, partial: jax.Array, bias: Any = None) -> jax.Array:
        whole = jax.lax.psum(partial, ALL_AXES)
        with jax.named_scope("unpack_shards"):
            own = jax.lax.dynamic_slice_in_dim(jnp.concatenate([whole, whole]), self.first, len(whole), axis=0)
        return _plus(own, bias)


def own_lines(slots: jax.Array, num_slots: int) -> jax.Array:
    """int32 `slots` of all shards as this shard's, which has `num_slots`; `num_slots` for those of the others."""
    if jax.lax.axis_size(DATA_AXIS) == 1:
        return slots
    own = slots - jax.lax.axis_index(DATA_AXIS) * num_slots
    return jnp.where((own >= 0) & (own < num_slots), own, num_slots)
