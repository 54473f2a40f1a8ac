"""Pages of the reference backend: [num_kv_heads, 2 (K, V), page_size, head_dim].

Heads come before tokens, so that one gather of (page, head) pieces, each contiguous, yields keys as [head, token, dim]: what a
matrix product per head wants. With tokens first, XLA on CPU transposes every key before it multiplies (measured: a quarter
to a half of the speed).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.metadata import AttentionMetadata

KV_HEAD_AXIS = 0
KEYS, VALUES = 0, 1


def page_shape(num_kv_heads: int, head_dim: int, page_size: int) -> tuple[int, int, int, int]:
    return (num_kv_heads, 2, page_size, head_dim)


def page_size_of(kv_cache: jax.Array) -> int:
    return kv_cache.shape[3]


def storage_dtype(dtype: jax.typing.DTypeLike, platform: str) -> jax.typing.DTypeLike:
    """bfloat16 lies in a CPU pool as its bits, uint16: XLA's CPU compiler turns a scatter into bfloat16 into a conversion
    of the whole pool to float32 and back, a second for a few GB (seen with JAX 0.10.2)."""
    return jnp.uint16 if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16 else jnp.dtype(dtype)


def write(
    kv_cache: jax.Array, k: jax.Array, v: jax.Array, metadata: AttentionMetadata, page_offset: jax.typing.ArrayLike
) -> jax.Array:
    """Scatters k, v [T, Hkv, D] to their slots; one scatter with a [Hkv, 2, D] window per token."""
    kv = _to_storage(jnp.stack([k, v], axis=2), kv_cache.dtype)
    pages = metadata.slot_pages + page_offset
    return kv_cache.at[pages, :, :, metadata.slot_offsets].set(
        kv, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def read(kv_cache: jax.Array, pages: jax.Array, which: int) -> jax.Array:
    """KEYS or VALUES of pages int32 [B, n]: float32 [B, Hkv, n * page_size, D]."""
    num_kv_heads, page_size, head_dim = kv_cache.shape[1], *kv_cache.shape[3:]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    pieces = kv_cache.at[pages[:, None, :], heads[None, :, None], which].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
    return _from_storage(pieces).reshape(pages.shape[0], num_kv_heads, pages.shape[1] * page_size, head_dim)


def _to_storage(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    if jnp.dtype(dtype) == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def _from_storage(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.uint16:
        x = jax.lax.bitcast_convert_type(x, jnp.bfloat16)
    return x.astype(jnp.float32)
