"""Grouped products: rows that are sorted by group, each group times a matrix of its own. Does not know what a group is.

A platform's way is chosen when a program is lowered (benchmarks/results/grouped_matmul.md says what was seen):
* TPU: `jax.lax.ragged_dot`, a kernel of the compiler's, which reads the matrices of groups that have rows.
* GPU: a kernel of ours (`kernels/pallas/gpu/grouped.py`), for the shapes and types that it takes.
* Elsewhere XLA expands ragged_dot to a product with every matrix, and writes the rows out once per group. On GPUs that is
  taken for few rows, where reading the matrices is all the work. Else a loop takes tiles of rows, as many as there are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Rows of a tile on CPUs: of 8, 32 and 128 the fastest with 8 to 2048 rows of 32 groups. On a GPU, what fills a tensor core.
_CPU_TILE = 8
_GPU_TILE = 64
_GPU_EXPANDED_ROWS = 256  # at which rows, once per group, are not yet larger than the matrices


class Groups(NamedTuple):
    sizes: jax.Array  # int32 [groups]: rows of each, in order; rows behind the last belong to none
    of_row: jax.Array  # int32 [rows]: a row's group; at least len(sizes) if it has none


def grouped_matmul(x: jax.Array, matrices: jax.Array, groups: Groups, out_dtype: Any) -> jax.Array:
    """x [rows, in], matrices [groups, in, out], of a narrower type perhaps -> [rows, out] of out_dtype; sums are float32.

    A row's result does not depend on other rows. Rows of no group get something finite.
    """

    def tiled(tile: int) -> Any:
        return lambda x, matrices, sizes: _tiled(x, matrices, sizes, tile).astype(out_dtype)

    def ragged(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, matrices, sizes, precision=matmul_precision(x), preferred_element_type=out_dtype)

    on_gpu = ragged if len(x) <= _GPU_EXPANDED_ROWS else tiled(_GPU_TILE)
    if x.dtype != jnp.float32:
        from jaxserve.kernels.pallas.gpu import grouped as gpu  # a second of imports, which a server on a CPU can do without

        if gpu.takes_grouped(x, matrices):
            on_gpu = functools.partial(gpu.grouped_matmul, out_dtype=out_dtype)
    result: jax.Array = jax.lax.platform_dependent(x, matrices, groups.sizes, tpu=ragged, cuda=on_gpu, default=tiled(_CPU_TILE))
    return result


def _tiled(x: jax.Array, matrices: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
    """Group by group, in tiles of `tile` rows. The last tile of a group runs over into rows that later tiles write again."""
    tiles = -(-sizes // tile)
    last_tiles, first_rows = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def one(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(last_tiles, index, side="right", method="compare_all")
        row = first_rows[group] + (index - last_tiles[group] + tiles[group]) * tile
        matrix = jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False).astype(x.dtype)
        rows = jax.lax.dynamic_slice_in_dim(padded, row, tile)
        product = jnp.dot(rows, matrix, precision=matmul_precision(x), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product, row, 0)

    out = jnp.zeros((len(padded), matrices.shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, last_tiles[-1], one, out)[: len(x)]


def matmul_precision(x: jax.Array) -> jax.lax.Precision | None:
    """A float32 model is computed in full float32 on any device."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
