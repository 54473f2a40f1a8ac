"""The KV cache's arrays: shapes and shardings, from what a backend says of a page, and where in them each group's pages lie.

Knows no heads and no tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxserve.kernels.api import PageArray
from jaxserve.models import TENSOR_AXIS


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
        return self.base + index * self.num_pages


@dataclasses.dataclass(frozen=True)
class KVCacheLayout:
    """A pytree of PageArray, `num_pages` times (those of all layers), over `tp_size` shards."""

    pages: Any
    num_pages: int
    tp_size: int

    def shapes(self) -> Any:
        """ShapeDtypeStruct per array, all shards together."""
        return jax.tree.map(self._shape, self.pages)

    def specs(self) -> Any:
        """PartitionSpec per array."""
        return jax.tree.map(_spec, self.pages)

    def _shape(self, page: PageArray) -> jax.ShapeDtypeStruct:
        shape = list(page.shape)
        if page.head_axis is not None:
            shape[page.head_axis] *= self.tp_size
        return jax.ShapeDtypeStruct((self.num_pages, *shape), page.dtype)


def _spec(page: PageArray) -> PartitionSpec:
    axes: list[str | None] = [None] * (1 + len(page.shape))
    if page.head_axis is not None:
        axes[1 + page.head_axis] = TENSOR_AXIS
    return PartitionSpec(*axes)
