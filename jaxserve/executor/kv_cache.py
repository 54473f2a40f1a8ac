"""The KV cache's arrays: shapes and shardings, from what a backend says of a page, and where in them each group's pages lie.

Of models whose layers keep states, too: there a state is what a page is elsewhere, and each request row has one. Knows no heads
and no tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxserve.kernels.api import PageArray
from jaxserve.models import DATA_AXIS, TENSOR_AXIS


class PagesAndStates(NamedTuple):
    """What is kept where some layers attend and others have states."""

    pages: Any
    states: dict[str, Any]  # arrays [layers * request rows, *state]


@dataclasses.dataclass(frozen=True)
class KVPool:
    """The part of the arrays that belongs to one KV group, the layers of one window: `num_pages` pages for each layer."""

    base: int  # pages of the groups before it
    num_layers: int
    num_pages: int

    @property
    def end(self) -> int:
        return self.base + self.num_layers * self.num_pages

    def page_offset(self, index: jax.Array) -> jax.Array:
        """Where page 0 of the group's `index`-th layer lies."""
        offset = index * self.num_pages
        return self.base + offset if self.base else offset  # without adding 0: so the first group's programs stay as they are


@dataclasses.dataclass(frozen=True)
class KVCacheLayout:
    """All that is kept of sequences: pages, and states if the model has some."""

    pages: ArraysLayout
    states: ArraysLayout | None

    def shapes(self) -> Any:
        """ShapeDtypeStruct per array, all shards together."""
        return self.pages.shapes() if self.states is None else PagesAndStates(self.pages.shapes(), self.states.shapes())

    def specs(self) -> Any:
        """PartitionSpec per array."""
        return self.pages.specs() if self.states is None else PagesAndStates(self.pages.specs(), self.states.specs())


@dataclasses.dataclass(frozen=True)
class ArraysLayout:
    """A pytree of PageArray, `count` times (those of all layers), over `tp_size` devices; and as much for each shard."""

    arrays: Any
    count: int
    tp_size: int  # over which attention is divided
    num_shards: int = 1

    def shapes(self) -> Any:
        """ShapeDtypeStruct per array, all shards together."""
        return jax.tree.map(self._shape, self.arrays)

    def specs(self) -> Any:
        """PartitionSpec per array."""
        return jax.tree.map(_spec, self.arrays)

    def _shape(self, page: PageArray) -> jax.ShapeDtypeStruct:
        shape = list(page.shape)
        if page.head_axis is not None:
            shape[page.head_axis] *= self.tp_size
        return jax.ShapeDtypeStruct((self.num_shards * self.count, *shape), page.dtype)


def _spec(page: PageArray) -> PartitionSpec:
    axes: list[str | None] = [DATA_AXIS, *[None] * len(page.shape)]
    if page.head_axis is not None:
        axes[1 + page.head_axis] = TENSOR_AXIS
    return PartitionSpec(*axes)
