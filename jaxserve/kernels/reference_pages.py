"""Pages of the reference backend: [num_kv_heads, 2 (K, V), page_size, head_dim], and scales without the last axis if quantized.

Where values are a part of the keys (latents), there is one row per token: [num_kv_heads, 1, page_size, head_dim].

Heads come before tokens, so that one gather of (page, head) pieces, each contiguous, yields keys as [head, token, dim]: what a
matrix product per head wants. With tokens first, XLA on CPU transposes every key before it multiplies (measured: a quarter
to a half of the speed).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.metadata import AttentionMetadata
from jaxserve.kernels.pages import PageArray
from jaxserve.kernels.rotary import quantize_rows
from jaxserve.kernels.spec import QUANTIZED_DTYPES

KV_HEAD_AXIS = 0
KEYS, VALUES = 0, 1

# Dtypes that lie in a CPU pool as their bits: XLA's CPU compiler turns a scatter into one of them into a conversion of the
# whole pool to float32 and back, a second for a few GB (bfloat16, seen with JAX 0.10.2).
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
_FROM_BITS = {bits: name for name, bits in _AS_BITS.items()}


class ReferenceKV(NamedTuple):
    """The KV cache. A quantized token is values * scale; otherwise there are no scales."""

    values: jax.Array  # [P, Hkv, 2 or 1, page_size, D]
    scales: jax.Array | None  # float32 [P, Hkv, 2 or 1, page_size]

    @property
    def page_size(self) -> int:
        return self.values.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.values.shape[1]

    @property
    def has_values(self) -> bool:
        """Or keys alone, which are the values, too."""
        return self.values.shape[2] == 2


def pages(
    num_kv_heads: int, head_dim: int, page_size: int, dtype: str, platform: str, *, has_values: bool = True
) -> ReferenceKV:
    """The same with PageArrays."""
    stored = _AS_BITS.get(dtype, dtype) if platform == "cpu" else dtype
    shape = (num_kv_heads, 2 if has_values else 1, page_size)
    values = PageArray((*shape, head_dim), jnp.dtype(stored), KV_HEAD_AXIS)
    scales = PageArray(shape, jnp.dtype(jnp.float32), KV_HEAD_AXIS)
    return ReferenceKV(values, scales if dtype in QUANTIZED_DTYPES else None)  # type: ignore[arg-type]


def write(cache: ReferenceKV, kv: jax.Array, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike) -> ReferenceKV:
    """Scatters keys and values [T, Hkv, 2 or 1, D] to their slots; one scatter with a [Hkv, 2 or 1, D] window per token."""
    pages = metadata.slot_pages + page_offset

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[pages, :, :, metadata.slot_offsets].set(
            rows, mode="drop", unique_indices=True, wrap_negative_indices=False
        )

    dtype = cache.values.dtype.name
    name = _FROM_BITS.get(dtype, dtype)
    if cache.scales is None:
        return ReferenceKV(put(cache.values, _as_stored(kv.astype(name), dtype)), None)
    values, scales = quantize_rows(kv, name)
    return ReferenceKV(put(cache.values, _as_stored(values, dtype)), put(cache.scales, scales))


def read(cache: ReferenceKV, pages: jax.Array, which: int) -> jax.Array:
    """KEYS or VALUES of pages int32 [B, n]: float32 [B, Hkv, n * page_size, D]."""
    heads = jnp.arange(cache.num_kv_heads, dtype=jnp.int32)

    def pieces(pool: jax.Array) -> jax.Array:
        found = pool.at[pages[:, None, :], heads[None, :, None], which].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        return found.reshape(*found.shape[:2], -1, *pool.shape[4:])

    values = pieces(cache.values)
    if (name := values.dtype.name) in _FROM_BITS:
        values = jax.lax.bitcast_convert_type(values, jnp.dtype(_FROM_BITS[name]))
    values = values.astype(jnp.float32)
    return values if cache.scales is None else values * pieces(cache.scales)[..., None]


def _as_stored(x: jax.Array, dtype: str) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(dtype)) if dtype in _FROM_BITS else x
