"""Rows of a few queries each, cut into what the decode kernel takes as rows: parts with as many queries as it has room for.

A row that verifies few drafts is one part. With more queries than a product has rows for it is several, each with the keys that
its own queries see, which are then read once per part.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class QueryParts:
    """Row r's queries are the first of its `row_q_len` tokens, those of part p the tokens p * q_len:(p + 1) * q_len of them."""

    row_q_len: int
    count: int  # per row
    q_len: int  # of a part

    @staticmethod
    def of(row_q_len: int, most: int) -> QueryParts:
        """As few as can be with `most` queries in each."""
        count = -(-row_q_len // most)
        return QueryParts(row_q_len, count, -(-row_q_len // count))

    def lens(self, kv_lens: jax.Array, q_lens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """int32 [R] of rows -> int32 [R * count] of parts: keys up to the part's last query, 0 without queries; and queries,
        None where rows can have but one."""
        if self.row_q_len == 1:
            return kv_lens, None
        first = jnp.arange(self.count, dtype=jnp.int32) * self.q_len
        part_q_lens = jnp.clip(q_lens[:, None] - first, 0, self.q_len)
        part_kv_lens = jnp.where(part_q_lens > 0, (kv_lens - q_lens)[:, None] + first + part_q_lens, 0)
        return part_kv_lens.reshape(-1), part_q_lens.reshape(-1)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """[R, ...] -> [R * count, ...]: each part has what its row has."""
        return x if self.count == 1 else jnp.repeat(x, self.count, axis=0)

    def cut(self, tokens: jax.Array) -> jax.Array:
        """[R * row_q_len, ...] -> [R * count, q_len, ...]; what a part has more than its row is zero."""
        rows = tokens.reshape(-1, self.row_q_len, *tokens.shape[1:])
        if padding := self.count * self.q_len - self.row_q_len:
            rows = jnp.pad(rows, ((0, 0), (0, padding), *[(0, 0)] * (tokens.ndim - 1)))
        return rows.reshape(-1, self.q_len, *tokens.shape[1:])

    def join(self, parts: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        rows = parts.reshape(-1, self.count * self.q_len, *parts.shape[2:])
        return rows[:, : self.row_q_len].reshape(-1, *parts.shape[2:])
