"""Arrays from any sharding to any other, element for element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from given_arrays import divided, trainer_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.arrays import ALL_AXES
from jaxserve.models.redistribute import redistribute

NUM_DEVICES = 8


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("target", [(1, 4), (2, 2), (1, 2), (1, 8)])
@pytest.mark.parametrize("of", [trainer_mesh(0, 2, 4), trainer_mesh(2, 4), trainer_mesh(7, 1), trainer_mesh(0, 3)])
def test_from_any_sharding_to_any(of: Mesh, target: tuple[int, int], reverse: bool) -> None:
    numbers = np.arange(24 * 16, dtype=np.float32).reshape(24, 16)
    array = divided(numbers, of)
    count = target[0] * target[1]
    devices = np.array(jax.devices()[NUM_DEVICES - count :])
    mesh = Mesh((devices[::-1] if reverse else devices).reshape(target), ALL_AXES)
    for spec in (PartitionSpec(*ALL_AXES), PartitionSpec(None, ALL_AXES), PartitionSpec("tensor"), PartitionSpec()):
        (moved,) = redistribute([array], [NamedSharding(mesh, spec)], fresh=[True])
        assert moved.sharding == NamedSharding(mesh, spec)
        np.testing.assert_array_equal(moved, numbers)


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")])
def test_cpu_devices_share_what_need_not_be_fresh(spec: PartitionSpec) -> None:
    """The other one's memory; whoever donates it afterwards gets other memory."""
    array = jax.jit(jnp.copy)(divided(np.arange(64.0, dtype=np.float32).reshape(8, 8), trainer_mesh(0, 2)))
    there = NamedSharding(trainer_mesh(2, 2), spec)
    addresses = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    for fresh in (True, False):
        (moved,) = redistribute([array], [there], fresh=[fresh])
        shared = {shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards} == addresses
        assert shared == (not fresh and spec == array.sharding.spec)
    jax.block_until_ready(jax.jit(jnp.negative, donate_argnums=0)(array))
    np.testing.assert_array_equal(moved, np.arange(64).reshape(8, 8))
