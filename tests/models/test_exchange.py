"""Tokens of shards come together and go back, in both ways, over devices that share a shard and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models.arrays import ALL_AXES, DATA_AXIS
from jaxserve.models.exchange import Exchange, GatherAll, PackAll, add_up, own_lines

T, WIDTH = 6, 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_in_order_begin_with_the_first_device(dtype: jnp.dtype) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 4), ALL_AXES)
    parts = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64, WIDTH)), dtype)
    sharded = jax.shard_map(
        lambda x: add_up(x[0], ALL_AXES, in_order=True),
        mesh=mesh,
        in_specs=PartitionSpec(ALL_AXES),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    wide = np.asarray(parts.astype(jnp.float32))
    expected = jnp.asarray(((wide[0] + wide[1]) + wide[2]) + wide[3]).astype(dtype)
    np.testing.assert_array_equal(np.asarray(jax.jit(sharded)(parts)), np.asarray(expected))


@pytest.mark.parametrize(("num_shards", "per_shard"), [(2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("counts", [[6, 0, 0, 0], [1, 2, 0, 3], [0, 0, 0, 6], [2, 2, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("packs", [False, True])
def test_sums_come_back_to_their_tokens(num_shards: int, per_shard: int, counts: list[int], packs: bool) -> None:
    counts = counts[:num_shards]
    mesh = Mesh(np.asarray(jax.devices()[: num_shards * per_shard]).reshape(num_shards, per_shard), ALL_AXES)
    x = np.arange(num_shards * T * WIDTH, dtype=np.float32).reshape(num_shards * T, WIDTH) + 1
    is_live = (np.arange(T) < np.asarray(counts)[:, None]).reshape(-1)
    x[~is_live] = np.nan if packs else 0
    numbers = np.arange(num_shards * T, dtype=np.int32).reshape(num_shards, T)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        shard = jax.lax.axis_index(DATA_AXIS)
        live = jnp.asarray(is_live.reshape(num_shards, T))
        exchange: Exchange = GatherAll()
        if packs:
            exchange = PackAll.of(jnp.asarray(counts, jnp.int32), shard, live[shard])
        everything = exchange.gather(x)
        share = everything * (1 + jax.lax.axis_index(ALL_AXES))  # of each device another
        picked = jnp.where(exchange.pick(live), exchange.pick(jnp.asarray(numbers)), -1)
        return everything, picked, exchange.sum_own(share, jnp.ones(WIDTH))

    by_shard, whole = PartitionSpec(DATA_AXIS), PartitionSpec()
    sharded = jax.shard_map(run, mesh=mesh, in_specs=by_shard, out_specs=(whole, whole, by_shard), check_vma=False)
    everything, picked, sums = map(np.asarray, jax.jit(sharded)(x))
    live_numbers = numbers.reshape(-1)[is_live]
    places = np.flatnonzero(picked >= 0)
    assert picked[places].tolist() == live_numbers.tolist()
    np.testing.assert_array_equal(everything[places], x[is_live])
    factor = sum(range(1, num_shards * per_shard + 1))
    np.testing.assert_allclose(sums[is_live], factor * x[is_live] + 1)
    assert np.isfinite(sums).all()


def test_lines_of_other_shards_are_behind_the_last() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(2, 1), ALL_AXES)
    slots = jnp.asarray([0, 4, 5, 9, 1 << 30], jnp.int32)
    sharded = jax.shard_map(
        lambda: own_lines(slots, 5), mesh=mesh, in_specs=(), out_specs=PartitionSpec(DATA_AXIS), check_vma=False
    )
    assert np.asarray(sharded()).reshape(2, -1).tolist() == [[0, 4, 5, 5, 5], [5, 5, 0, 4, 5]]
