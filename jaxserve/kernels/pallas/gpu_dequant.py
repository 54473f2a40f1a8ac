"""Quantized tiles of keys or values, made into tiles that wgmma takes: one warpgroup, shared memory to shared memory.

wgmma's second operand must lie in shared memory in the queries' dtype. Every float8_e4m3fn and every int8 is exact in bfloat16
and float16, so tiles are converted as they are; a token's scale belongs to a column of the scores (keys) or of the weights
(values), where it costs fewer multiplications and is applied in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu_common import transforms

DTYPES = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.int8)))


def is_quantized(dtype: Any) -> bool:
    return jnp.dtype(dtype) in DTYPES


def raw_transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Of a buffer for tiles as they come: plain rows where no swizzle fits (80 columns), since wgmma never sees it."""
    return transforms(columns, dtype) if columns * jnp.dtype(dtype).itemsize % 32 == 0 else ()


def convert_tile(raw_smem: Any, out_smem: Any, swizzle: int) -> None:
    """[N, D] as it was loaded -> [N, D] in the queries' dtype, a buffer with that swizzle (bytes).

    Other warpgroups and wgmma may read it when this returns.
    """
    columns, dtype = out_smem.shape[1], out_smem.dtype
    # At a time, to hold few registers; int8 takes the long way to float16. The layout wants a multiple of four swizzle tiles.
    rows = 16 if raw_smem.dtype == jnp.int8 and dtype == jnp.float16 and columns % 128 == 0 else 32
    layout = plgpu.Layout.SMEM_GMEM_COPY((rows, columns), dtype, swizzle)  # 16 bytes per store
    for row in range(0, out_smem.shape[0], rows):
        value = plgpu.load(raw_smem.at[pl.ds(row, rows)], layout=layout, optimized=False)
        out_smem[row : row + rows] = _cast(value, dtype)
    plgpu.commit_smem()


def _cast(value: jax.Array, dtype: Any) -> jax.Array:
    if value.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:  # sm_90 has one instruction to float16, none to bfloat16
        return value.astype(jnp.float16).astype(jnp.float32).astype(dtype)
    if value.dtype == jnp.int8 and dtype == jnp.float16:  # and only bfloat16 is quickly made from int8
        return value.astype(jnp.bfloat16).astype(jnp.float32).astype(dtype)
    return value.astype(dtype)


def load_scales(scales_smem: Any) -> jax.Array:
    """float32 [N] from shared memory, laid out as the columns of a wgmma result."""
    return plgpu.load(scales_smem, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def scale_columns(x: jax.Array, scales: jax.Array) -> jax.Array:
    """x [M, N] times scales [N]."""
    return x * lax.broadcast_in_dim(scales, x.shape, [1])


def clear_scales(scales_smem: Any) -> None:
    """Zeros in scales [N] that are not finite, for tiles with dead tokens: a weight of 0 does not undo a NaN.

    For one warpgroup, which calls commit_smem afterwards: TMA will write there again.
    Not by position: the columns' numbers would stay in registers from tile to tile, where head_dim 256 has none to spare.
    """
    scales = load_scales(scales_smem)
    scales_smem[...] = jnp.where(jnp.abs(scales) < jnp.finfo(jnp.float32).max, scales, 0.0)
