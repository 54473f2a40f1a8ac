"""The grouped product for GPUs, interpreted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.pallas.gpu.grouped import GroupedConfig, grouped_matmul, takes_grouped

SMALL = GroupedConfig(rows=4, many_rows=8, many=64, columns=32, depth=16)  # more than divide what is tested


@pytest.mark.parametrize("sizes", [(3, 0, 20, 1, 9), (0, 0, 0, 0, 0), (40, 0, 0, 0, 0), (0, 0, 0, 0, 1), (8, 8, 8, 8, 8)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("num_rows", [40, 72])
def test_each_group_is_multiplied_with_its_matrix(sizes: tuple[int, ...], dtype: Any, num_rows: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((num_rows, 24)).astype(np.float32)
    matrices = random.integers(-9, 9, (5, 24, 48)).astype(dtype)
    of_row = np.repeat(np.arange(5), sizes)
    expected = np.zeros((num_rows, 48), np.float32)
    for row, group in enumerate(of_row):
        expected[row] = x[row] @ matrices[group].astype(np.float32)
    x[len(of_row) :] = np.nan  # belongs to no group
    arrays = jnp.asarray(x), jnp.asarray(matrices), jnp.asarray(sizes, jnp.int32)
    np.testing.assert_allclose(grouped_matmul(*arrays, jnp.float32, SMALL, interpret=True), expected, rtol=1e-5, atol=1e-4)


def test_what_the_kernel_takes() -> None:
    x, matrices = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((2, 128, 256), jnp.int8)
    assert takes_grouped(x, matrices)
    assert takes_grouped(x, matrices[:, :, :96]) and takes_grouped(x[:, :48], matrices[:, :48])
    assert not takes_grouped(x.astype(jnp.float32), matrices)
    assert not takes_grouped(x[:, :40], matrices[:, :40])
    assert not takes_grouped(x, matrices[:, :, :80])


def test_tiles_are_as_large_as_sizes_let_them_be() -> None:
    default = GroupedConfig()
    assert default.for_sizes(768, 4096) == default
    way_back = default.for_sizes(2880, 2880)  # of gpt-oss
    assert (way_back.depth, way_back.columns) == (64, 64)
    assert default.for_sizes(1440, 5760).depth == 32
