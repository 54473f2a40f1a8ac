"""Zeros in C++: zeros whatever was there, and no memory before they are touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp_compiler import needs_compiler

from jaxserve.kernels.native.zero_pages import zero_pages

pytestmark = needs_compiler

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def make(*shapes: tuple[tuple[int, ...], Any]) -> Any:
    return jax.jit(lambda: [zero_pages(jax.ShapeDtypeStruct(*shape)) for shape in shapes]).lower().compile()


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1023,), (4096, 3), (0, 7), (5 * MIB,)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_zeros_whatever_was_there(shape: tuple[int, ...], dtype: Any) -> None:
    """Freed memory full of ones is what an allocator hands out again; of 5 MiB, a part of a heap or a mapping of its own."""
    zeros = make((shape, dtype))
    for _ in range(3):
        (found,) = zeros()
        assert found.shape == shape and found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), np.zeros(shape, dtype))
        dirty = jnp.ones(shape, dtype) + found
        jax.block_until_ready(dirty)
        del found, dirty


def test_two_of_a_kind_are_two_arrays() -> None:
    shape = ((64, MIB), jnp.float32)
    before = resident_bytes()
    first, second = jax.block_until_ready(make(shape, shape)())
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
    assert resident_bytes() - before < 64 * MIB, "of 512 MiB"


def test_donated_they_are_written_in_place() -> None:
    (pool,) = make(((64, MIB), jnp.float32))()
    write = jax.jit(lambda pool: pool.at[7, 5].set(1.0), donate_argnums=0).lower(pool).compile()
    where = pool.unsafe_buffer_pointer()
    pool = jax.block_until_ready(write(pool))
    assert pool.unsafe_buffer_pointer() == where
    assert float(pool[7, 5]) == 1.0 and float(pool[7].sum()) == 1.0
