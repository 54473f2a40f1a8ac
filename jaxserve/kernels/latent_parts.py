"""A step of latent attention in two: rows of few queries are absorbed, those of many read keys and values of their own.

Either side is done in parts of one static size, as many as the step needs. A part of the absorbed side is so many queries,
which are a step of their own; one of the expanded side is so many pages of keys, from whichever rows, for all queries.
T tokens, R rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Division:
    """How steps are divided. The sizes of parts were not measured: they are large beside what a part costs to begin."""

    fewest_tokens: int = 1  # of a step that is worth dividing
    absorbed_tokens: int = 512  # of a part
    expanded_bytes: int = 128 << 20  # of a part's keys and values, at most
    most_expanded_parts: int = 64  # rows behind that are absorbed

    def sizes(self, spec: AttentionSpec, num_tokens: int, num_rows: int, max_pages: int) -> Sizes | None:
        """None: all is absorbed."""
        fewest_queries = spec.expanding_pays_from
        if fewest_queries is None or num_tokens < max(fewest_queries, self.fewest_tokens):
            return None
        assert spec.projected is not None
        token_bytes = spec.num_heads * (spec.projected.key_dim + spec.projected.value_dim) * jnp.dtype(spec.dtype).itemsize
        # The step's own tokens are one part, with room for the ends of some rows' last pages.
        tokens = min(num_tokens + num_tokens // 8, max(self.expanded_bytes // token_bytes, spec.page_tokens))
        pages = -(-tokens // spec.page_tokens)
        most_rows = min(num_rows, num_tokens // fewest_queries)
        return Sizes(
            fewest_queries,
            min(num_tokens, max(self.absorbed_tokens, num_rows)),
            pages,
            min(-(-most_rows * max_pages // pages), self.most_expanded_parts),
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    fewest_queries: int  # of a row whose keys are expanded
    absorbed_tokens: int  # of a part
    pages: int  # of an expanded part
    expanded_parts: int  # at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AbsorbedPart:
    """Some of the step's tokens, row by row, as a step."""

    tokens: jax.Array  # int32 [n]; T, which no token has, for padding
    kv_lens: jax.Array  # int32 [R] keys that the row's last query here sees; 0 of a row without a query
    cu_q_lens: jax.Array  # int32 [R + 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpandedPart:
    """Some of the pages of some rows, one behind the other, each for its row's queries of the step."""

    pages: jax.Array  # int32 [n] in the pool; any one where there are no more
    first_pages: jax.Array  # int32 [R] where the row's pages begin here
    kv_lens: jax.Array  # int32 [R] keys that it has here
    first_positions: jax.Array  # int32 [R] of its first query, counted from the first of these keys

    def in_parts(self, count: int) -> ExpandedPart:
        """The same with each page as `count` smaller ones, which are no pages of the pool any more."""
        if count == 1:
            return self
        return dataclasses.replace(self, pages=jnp.repeat(self.pages, count), first_pages=self.first_pages * count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Of a step, and which of them are expanded."""

    kv_lens: jax.Array
    q_lens: jax.Array
    starts: jax.Array  # int32 [R] their first tokens
    is_expanded: jax.Array
    num_tokens: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int, page_size: int, sizes: Sizes) -> Rows:
        q_lens = jnp.diff(cu_q_lens)
        wanted = q_lens >= sizes.fewest_queries
        pages = jnp.where(wanted, -(-kv_lens // page_size), 0)
        has_room = jnp.cumsum(pages) <= sizes.pages * sizes.expanded_parts
        return Rows(kv_lens, q_lens, cu_q_lens[:-1], wanted & has_room, num_tokens, page_size)

    def num_absorbed(self, size: int) -> jax.Array:
        return -(-jnp.sum(self._absorbed_lens(), dtype=jnp.int32) // size)

    def num_expanded(self, size: int) -> jax.Array:
        return -(-jnp.sum(self._pages(), dtype=jnp.int32) // size)

    def absorbed(self, index: jax.Array, size: int) -> AbsorbedPart:
        lens = self._absorbed_lens()
        row, at, first, end = _cut(lens, index, size)
        q_lens = end - first
        kv_lens = jnp.where(q_lens > 0, self.kv_lens - (lens - end), 0)
        tokens = jnp.where(at < lens[row], self.starts[row] + at, self.num_tokens)
        return AbsorbedPart(tokens, kv_lens, jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)]))

    def expanded(self, index: jax.Array, size: int, page_table: jax.Array) -> ExpandedPart:
        lens = self._pages()
        row, at, first, end = _cut(lens, index, size)
        first_key = first * self.page_size
        return ExpandedPart(
            jnp.where(at < lens[row], page_table[row, jnp.minimum(at, page_table.shape[1] - 1)], 0),
            jnp.cumsum(end - first, dtype=jnp.int32) - (end - first),
            jnp.where(end > first, jnp.minimum(self.kv_lens, end * self.page_size) - first_key, 0),
            self.kv_lens - self.q_lens - first_key,
        )

    def _absorbed_lens(self) -> jax.Array:
        return jnp.where(self.is_expanded, 0, self.q_lens)

    def _pages(self) -> jax.Array:
        return jnp.where(self.is_expanded, -(-self.kv_lens // self.page_size), 0)


def _cut(lens: jax.Array, index: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Part `index`, of `size`, of what lies one behind the other, `lens` [R] of each row: the row of each place in it and the
    place in the row, [size] (at or past its length: nothing is there), and each row's first place here and its end, [R]."""
    ends = jnp.cumsum(lens, dtype=jnp.int32)
    starts = ends - lens
    place = index * size + jnp.arange(size, dtype=jnp.int32)
    found = jnp.searchsorted(ends, place, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(found, len(lens) - 1)
    first, end = (jnp.clip(border - starts, 0, lens) for border in (index * size, (index + 1) * size))
    return row, place - starts[row], first, end


def stacked(make: Any, count: jax.Array, most: int) -> Any:
    """make(0), .., make(count - 1), each a pytree of arrays, as one with an axis of `most` in front."""
    empty = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), jax.eval_shape(make, jnp.int32(0)))

    def add(index: jax.Array, made: Any) -> Any:
        return jax.tree.map(lambda all_, one: all_.at[index].set(one), made, make(index))

    return jax.lax.fori_loop(0, count, add, empty)
