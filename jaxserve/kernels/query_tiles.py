"""Query tiles: a step's queries cut into pieces of equal static size, longest context first.

A tile is up to `tile_tokens` consecutive queries of one row. Rows that decode get a list of tiles as wide as they need, so
that in a mixed step they do not pay for the width that prompts need. Lists have a static length; idle tiles stand at the end.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """int32 arrays of one length N, ordered by falling `kv_end`: tiles of like length are neighbours, idle ones last."""

    row: jax.Array
    first_token: jax.Array  # index of the tile's first query in the step's tokens
    first_pos: jax.Array  # its position in the sequence
    num_tokens: jax.Array  # live queries; 0: the tile is idle
    kv_end: jax.Array  # one past the last position that any query of the tile may see; 0 for idle tiles
    tile_tokens: int = dataclasses.field(metadata={"static": True})

    def __len__(self) -> int:
        return self.row.shape[0]

    def block(self, start: jax.typing.ArrayLike, size: int) -> QueryTiles:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), self)

    def sorted(self) -> QueryTiles:
        order = jnp.argsort(-self.kv_end)
        return jax.tree.map(lambda x: x[order], self)


def decode_tiles(kv_lens: jax.Array, q_lens: jax.Array, decode_q_len: int) -> QueryTiles:
    """One tile per row, for steps in which row r's queries are the first q_lens[r] of its `decode_q_len` tokens."""
    row = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    kv_end = jnp.where(q_lens > 0, kv_lens, 0)
    return QueryTiles(row, row * decode_q_len, kv_lens - q_lens, q_lens, kv_end, tile_tokens=decode_q_len).sorted()


def extend_tiles(
    kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int, tile_tokens: int, *, is_causal: bool = True
) -> tuple[QueryTiles, QueryTiles]:
    """Tiles of the rows with one query, and of the rows with more."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_single = q_lens == 1
    row = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    kv_end = jnp.where(is_single, kv_lens, 0)
    single = QueryTiles(row, cu_q_lens[:-1], kv_lens - 1, is_single.astype(jnp.int32), kv_end, tile_tokens=1)
    wanted_lens = jnp.where(is_single, 0, q_lens)
    return single.sorted(), cut_rows(
        kv_lens, cu_q_lens, wanted_lens, kv_lens - wanted_lens, num_tokens, tile_tokens, is_causal=is_causal
    )


def all_alike_tiles(
    kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int, tile_tokens: int, *, is_causal: bool = True
) -> tuple[QueryTiles]:
    """Tiles of all rows, also of those with one query."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    first_positions = kv_lens - q_lens
    return (cut_rows(kv_lens, cu_q_lens, q_lens, first_positions, num_tokens, tile_tokens, is_causal=is_causal, shortest=1),)


def cut_rows(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    wanted_lens: jax.Array,
    first_positions: jax.Array,
    num_tokens: int,
    tile_tokens: int,
    *,
    is_causal: bool = True,
    shortest: int = 2,
) -> QueryTiles:
    """Cuts each row's `wanted_lens` queries, all of the row's or none, and if any at least `shortest`, into tiles.

    A row's first query stands at `first_positions`, from the first of its kv_lens keys: perhaps before it, or behind them all.
    """
    num_rows, tile_tokens = kv_lens.shape[0], min(tile_tokens, num_tokens)
    tiles_per_row = -(-wanted_lens // tile_tokens)
    ends = jnp.cumsum(tiles_per_row, dtype=jnp.int32)
    # The sum over rows of ceil(len / tile_tokens), at most.
    max_tiles = max(1, (num_tokens + min(num_rows, num_tokens // shortest) * (tile_tokens - 1)) // tile_tokens)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32), num_rows - 1)
    done = (tile - (ends - tiles_per_row)[row]) * tile_tokens  # queries of the row in earlier tiles
    first_pos = first_positions[row] + done
    live = jnp.where(tile < ends[-1], jnp.clip(wanted_lens[row] - done, 0, tile_tokens), 0)
    kv_end = jnp.where(live > 0, jnp.clip(first_pos + live, 0, kv_lens[row]) if is_causal else kv_lens[row], 0)
    return QueryTiles(row, cu_q_lens[row] + done, first_pos, live, kv_end, tile_tokens).sorted()
