"""Grouped products on Hopper, in one kernel of Triton's: rows that are sorted by group, each group times a matrix of its own.

A program takes a tile of one group's rows and some columns. Of matrices it reads those of groups that have rows, once per tile
of them, and nothing is written but the result. Matrices of a narrower type are converted behind their loads.
Proven by the interpreter and compiled; it has not been timed on a device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """Chosen by reasoning, not timed."""

    rows: int = 16  # of a tile: the least that tensor cores multiply. In decode steps few rows share a group
    many_rows: int = 64  # the same from `many` on
    many: int = 1024
    columns: int = 128  # at most
    depth: int = 64  # at most: what is multiplied at a time; 16 KB of a bfloat16 matrix
    warps: int = 4
    stages: int = 4  # of loads in flight

    def for_sizes(self, size_in: int, size_out: int) -> GroupedConfig:
        """With tiles that divide both: gpt-oss's 2880 columns are 45 times 64."""
        return dataclasses.replace(self, columns=math.gcd(self.columns, size_out), depth=math.gcd(self.depth, size_in))


DEFAULT = GroupedConfig()
_LEAST_COLUMNS, _LEAST_DEPTH = 32, 16  # below that a tensor core, or a memory transaction, is not filled


def takes_grouped(x: jax.Array, matrices: jax.Array) -> bool:
    """Whether the kernel computes this. Float32 is left to products that are exact."""
    is_narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    return is_narrow and x.shape[1] % _LEAST_DEPTH == 0 and matrices.shape[2] % _LEAST_COLUMNS == 0


def grouped_matmul(
    x: jax.Array,
    matrices: jax.Array,
    sizes: jax.Array,
    out_dtype: Any,
    config: GroupedConfig = DEFAULT,
    *,
    interpret: bool = False,
) -> jax.Array:
    """x [rows, in], matrices [groups, in, out], sizes int32 [groups] -> [rows, out]; rows of no group get zeros."""
    (num_rows, size_in), size_out = x.shape, matrices.shape[2]
    config = config.for_sizes(size_in, size_out)
    tile = config.many_rows if num_rows >= config.many else config.rows
    groups, firsts, ends = tiles_of_groups(sizes, num_rows, tile)
    out = pl.pallas_call(
        functools.partial(_tile, rows=tile, size_in=size_in, config=config),
        grid=(size_out // config.columns, len(groups)),
        out_shape=jax.ShapeDtypeStruct((num_rows, size_out), out_dtype),
        compiler_params=triton.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="grouped_matmul",
    )(groups, firsts, ends, x, matrices)
    has_group = jnp.arange(num_rows) < jnp.sum(sizes)
    return jnp.where(has_group[:, None], out, 0)


def tiles_of_groups(sizes: jax.Array, num_rows: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of as many tiles as there can be, int32 [tiles]: the group, its first row of the tile, and where the group's rows end.
    Those that are not needed have no rows."""
    most = min(num_rows, min(num_rows, len(sizes)) + num_rows // tile)
    tiles, number = -(-sizes // tile), jnp.arange(most)
    last_tiles, first_rows = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    groups = jnp.minimum(jnp.searchsorted(last_tiles, number, side="right", method="compare_all"), len(sizes) - 1)
    firsts = first_rows[groups] + (number - last_tiles[groups] + tiles[groups]) * tile
    ends = jnp.where(number < last_tiles[-1], first_rows[groups] + sizes[groups], 0)
    return groups.astype(jnp.int32), firsts.astype(jnp.int32), ends.astype(jnp.int32)


def _tile(
    groups: Any, firsts: Any, ends: Any, x: Any, matrices: Any, out: Any, *, rows: int, size_in: int, config: GroupedConfig
) -> None:
    first_column, number = pl.program_id(0) * config.columns, pl.program_id(1)
    group, first, end = groups[number], firsts[number], ends[number]

    @pl.when(first < end)
    def _() -> None:
        row = (first + jnp.arange(rows))[:, None]
        column = (first_column + jnp.arange(config.columns))[None]

        def is_mine(width: int) -> jax.Array:
            return jnp.broadcast_to(row < end, (rows, width))

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            inner = step * config.depth + jnp.arange(config.depth)
            left = triton.load(x.at[row, inner[None]], mask=is_mine(config.depth), other=0)
            right = triton.load(matrices.at[group, inner[:, None], column])
            return total + triton.dot(left, right.astype(left.dtype))

        total = jnp.zeros((rows, config.columns), jnp.float32)
        total = jax.lax.fori_loop(0, size_in // config.depth, add, total)
        triton.store(out.at[row, column], total.astype(out.dtype), mask=is_mine(config.columns))
