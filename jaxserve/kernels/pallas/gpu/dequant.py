"""Quantized tiles of keys or values, made into tiles that wgmma takes: one warpgroup, shared memory to shared memory.

wgmma's second operand must lie in shared memory with 16 bits a value. Every float8_e4m3fn and every int8 is exact in bfloat16
and float16, so tiles are converted as they are; a token's scale belongs to a column of the scores (keys) or of the weights
(values), where it costs fewer multiplications and is applied in float32.

One instruction makes two float16 of two float8_e4m3fn, four make bfloat16 of them. float16 has the digits for queries and for
weights times scales, but not the range: each row of queries is divided by a power of two that its scores are multiplied with,
and peaks are raised by what brings weights times scales into range.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu.common import transforms

DTYPES = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.int8)))


def is_quantized(dtype: Any) -> bool:
    return jnp.dtype(dtype) in DTYPES


def tile_dtype(kv_dtype: Any, dtype: Any) -> Any:
    """Of the tiles that wgmma reads, and so of its other operand, for queries of `dtype`."""
    return jnp.dtype(jnp.float16 if jnp.dtype(kv_dtype) == jnp.float8_e4m3fn else dtype)


def raw_transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Of a buffer for tiles as they come: plain rows where no swizzle fits (80 columns), since wgmma never sees it."""
    return transforms(columns, dtype) if columns * jnp.dtype(dtype).itemsize % 32 == 0 else ()


def convert_tile(raw_smem: Any, out_smem: Any, swizzle: int) -> None:
    """[N, D] as it was loaded -> [N, D] in the queries' dtype, a buffer with that swizzle (bytes).

    Other warpgroups and wgmma may read it when this returns.
    """
    columns, dtype = out_smem.shape[1], out_smem.dtype
    rows = 32  # at a time, to hold few registers; the layout wants a multiple of four swizzle tiles
    layout = plgpu.Layout.SMEM_GMEM_COPY((rows, columns), dtype, swizzle)  # 16 bytes per store
    for row in range(0, out_smem.shape[0], rows):
        value = plgpu.load(raw_smem.at[pl.ds(row, rows)], layout=layout, optimized=False)
        out_smem[row : row + rows] = _cast(value, dtype)
    plgpu.commit_smem()


def _cast(value: jax.Array, dtype: Any) -> jax.Array:
    if value.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:  # sm_90 has one instruction to float16, none to bfloat16
        return value.astype(jnp.float16).astype(jnp.float32).astype(dtype)
    if value.dtype == jnp.int8 and dtype == jnp.float16:  # as the last digits of 1024 + 128 + value, whose first are known
        bits = lax.bitcast_convert_type(value, jnp.uint8) ^ jnp.uint8(0x80)
        return lax.bitcast_convert_type(bits.astype(jnp.uint16) | jnp.uint16(0x6400), dtype) - jnp.float16(1152)
    return value.astype(dtype)


def load_scales(scales_smem: Any) -> jax.Array:
    """float32 [N] from shared memory, laid out as the columns of a wgmma result."""
    return plgpu.load(scales_smem, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def scale_columns(x: jax.Array, scales: jax.Array) -> jax.Array:
    """x [M, N] times scales [N]."""
    return x * lax.broadcast_in_dim(scales, x.shape, [1])


def normalize_queries(q_smem: Any, dtype: Any) -> jax.Array:
    """Bits of q [M, D] in `dtype`, made float16 in place: each row divided by the returned power of two, float32 [M].

    Only what is less than 2**-14 of a row's largest is rounded. For one warpgroup, before its wgmma.
    """
    width = math.gcd(q_smem.shape[1], 64)
    pieces = [pl.ds(column, width) for column in range(0, q_smem.shape[1], width)]
    loaded = [plgpu.load(q_smem.at[:, piece], layout=plgpu.Layout.WGMMA) for piece in pieces]
    values = [lax.bitcast_convert_type(value, dtype) for value in loaded]
    sizes = [jnp.abs(value.astype(jnp.float32)).max(axis=1) for value in values]
    bits = lax.bitcast_convert_type(functools.reduce(jnp.maximum, sizes), jnp.int32)
    # The exponent alone, kept where its inverse is a number, too; infinities and NaNs remain what they are.
    bits = jnp.minimum(jnp.maximum(bits, 30 << 23), 253 << 23) & (0xFF << 23)
    unit, inverse = (lax.bitcast_convert_type(x, jnp.float32) for x in (bits, (254 << 23) - bits))
    for piece, value in zip(pieces, values, strict=True):
        divided = value.astype(jnp.float32) * lax.broadcast_in_dim(inverse, value.shape, [0])
        q_smem[:, piece] = divided.astype(q_smem.dtype)
    plgpu.commit_smem()
    return unit


def offset_of_scales(scales: jax.Array, rows: int) -> jax.Array:
    """By how much peaks must be raised so that weights times scales [N] are below 2**15, float32 [rows], base 2.

    A softmax may be taken relative to any number: this one is gone when values are divided by the sum of the weights.
    """
    largest = lax.broadcast_in_dim(scales, (rows, *scales.shape), [1]).max(axis=1)
    return jnp.log2(jnp.maximum(largest, 2.0**-96)) - 14


def clear_scales(scales_smem: Any) -> None:
    """Zeros in scales [N] that are not finite, for tiles with dead tokens: a weight of 0 does not undo a NaN.

    For one warpgroup, which calls commit_smem afterwards: TMA will write there again.
    Not by position: the columns' numbers would stay in registers from tile to tile, where head_dim 256 has none to spare.
    """
    scales = load_scales(scales_smem)
    scales_smem[...] = jnp.where(jnp.abs(scales) < jnp.finfo(jnp.float32).max, scales, 0.0)
