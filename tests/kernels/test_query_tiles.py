"""Query tiles cover every live query exactly once, longest contexts first."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels.query_tiles import QueryTiles, decode_tiles, extend_tiles


def covered(tiles: QueryTiles) -> list[tuple[int, int, int]]:
    """(token, row, position) of each query; checks the order of the tiles."""
    ends = np.asarray(tiles.kv_end)
    assert np.all(np.diff(ends) <= 0), ends
    fields = zip(*(np.asarray(x) for x in (tiles.row, tiles.first_token, tiles.first_pos, tiles.num_tokens)), strict=True)
    return [(int(t + i), int(r), int(p + i)) for r, t, p, n in fields for i in range(n)]


def test_decode() -> None:
    tiles = decode_tiles(jnp.array([5, 0, 9, 1], jnp.int32), jnp.array([1, 0, 1, 1], jnp.int32), 1)
    assert tiles.tile_tokens == 1
    assert covered(tiles) == [(2, 2, 8), (0, 0, 4), (3, 3, 0)]


def test_decode_of_several_queries() -> None:
    tiles = decode_tiles(jnp.array([5, 0, 9], jnp.int32), jnp.array([3, 0, 1], jnp.int32), 4)
    assert tiles.tile_tokens == 4
    assert covered(tiles) == [(8, 2, 8), (0, 0, 2), (1, 0, 3), (2, 0, 4)]


def test_single_queries_do_not_pay_for_wide_tiles() -> None:
    kv_lens, cu = jnp.array([7, 20, 4, 0], jnp.int32), jnp.array([0, 1, 11, 12, 12], jnp.int32)
    single, wide = extend_tiles(kv_lens, cu, num_tokens=16, tile_tokens=8)
    assert (single.tile_tokens, wide.tile_tokens) == (1, 8)
    assert covered(single) == [(0, 0, 6), (11, 2, 3)]
    assert covered(wide) == [(9, 1, 18), (10, 1, 19), *((1 + i, 1, 10 + i) for i in range(8))]


def test_tiles_see_whole_rows_where_attention_is_not_causal() -> None:
    kv_lens, cu = jnp.array([1, 20, 9, 0], jnp.int32), jnp.array([0, 1, 21, 30, 30], jnp.int32)
    single, wide = extend_tiles(kv_lens, cu, num_tokens=32, tile_tokens=8, is_causal=False)
    assert covered(single) == [(0, 0, 0)]
    assert covered(wide) == [*((1 + i, 1, i) for i in range(20)), *((21 + i, 2, i) for i in range(9))]
    np.testing.assert_array_equal(wide.kv_end[:6], [20, 20, 20, 9, 9, 0])


def test_tiles_are_no_wider_than_the_step() -> None:
    _, wide = extend_tiles(jnp.array([3], jnp.int32), jnp.array([0, 3], jnp.int32), num_tokens=4, tile_tokens=32)
    assert wide.tile_tokens == 4


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=6, max_size=6),
    num_tokens=st.sampled_from([1, 17, 60]),  # each shape is compiled
    tile_tokens=st.sampled_from([1, 5, 64]),
)
def test_every_query_once(rows: list[tuple[int, int]], num_tokens: int, tile_tokens: int) -> None:
    cu = np.minimum(np.cumsum([0, *(query_len for query_len, _ in rows)]), num_tokens).astype(np.int32)
    q_lens = np.diff(cu)
    kv_lens = np.where(q_lens, q_lens + [cached for _, cached in rows], 0).astype(np.int32)
    tiles = extend_tiles(jnp.asarray(kv_lens), jnp.asarray(cu), num_tokens, tile_tokens)
    found = sorted(query for one in tiles for query in covered(one))
    wanted = [(int(cu[r]) + i, r, int(kv_lens[r] - q_lens[r]) + i) for r in range(len(rows)) for i in range(q_lens[r])]
    assert found == wanted
