"""The kernels for low-rank adapters on GPUs, interpreted, against the sum written out."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from low_rank_cases import SHAPES, Shape, draw, expected

from jaxserve.kernels.pallas.gpu.low_rank import LowRankConfig, SlotTiles, add_low_rank, takes_low_rank

# Smaller than what is tested, and more than divide it.
SMALL = LowRankConfig(rows=4, many_rows=8, many=60, columns=32, depth=16, shares=4, many_shares=2, lines=16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_gets_its_own_slots_product(shape: Shape) -> None:
    drawn = draw(shape)
    (adapters, base, x, slots), wanted = drawn, expected(drawn)
    tiles = SlotTiles.of(jnp.asarray(slots), shape.slots, SMALL)
    arrays = (jnp.asarray(base), jnp.asarray(x), tiles, jnp.asarray(adapters.a), [jnp.asarray(b) for b in adapters.b])
    found = np.asarray(add_low_rank(*arrays, adapters.widths, SMALL, interpret=True))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_array_equal(found[slots < 0], base[slots < 0])


def test_tokens_are_sorted_by_slot_in_tiles_of_one() -> None:
    tiles = SlotTiles.of(jnp.asarray([2, -1, 0, 2, 2, 2, 0, 2, -1], jnp.int32), 3, SMALL)
    assert tiles.order.tolist() == [2, 6, 0, 3, 4, 5, 7, 1, 8]
    needed = tiles.firsts < tiles.ends
    assert tiles.slots[needed].tolist() == [0, 2, 2]
    assert tiles.firsts[needed].tolist() == [0, 2, 6] and tiles.ends[needed].tolist() == [2, 7, 7]


def test_what_the_kernels_take() -> None:
    x, a, narrow = jnp.zeros((8, 96), jnp.bfloat16), jnp.zeros((2, 96, 3, 8), jnp.bfloat16), jnp.zeros((2, 8, 64), jnp.bfloat16)
    assert takes_low_rank(x, a, (narrow,) * 3, (64, 32, 32))
    assert not takes_low_rank(x, a, (narrow,) * 3, (32, 16, 16))
    assert takes_low_rank(x, a[:, :, :1], (narrow,), (1,))  # of one matrix columns are not in periods
    assert not takes_low_rank(x, a[:, :, :1], (narrow[:, :, :56],), (56,))
    assert not takes_low_rank(x[:, :88], a[:, :88], (narrow,) * 3, (64, 32, 32))
    assert not takes_low_rank(x.astype(jnp.float32), a, (narrow,) * 3, (64, 32, 32))


def test_blocks_are_what_divides_a_models_sizes() -> None:
    config = LowRankConfig()
    assert config.columns_for((512, 128, 128)) == 128 and config.columns_for((448, 64, 64)) == 64
    assert config.cut(4096, 64) == (8, 64) and config.cut(4096, 2048) == (4, 64)
    assert config.cut(896, 64) == (2, 64) and config.cut(16, 1) == (1, 16)
    assert [config.lines_for(size) for size in (1, 16, 48, 192)] == [16, 16, 64, 64]
