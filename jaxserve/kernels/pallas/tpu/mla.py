"""Multi-head latent attention (DeepSeek) on TPUs, absorbed: all heads read one row per token, its latent and its rotated key.

It is the kernel of kernel with one KV head and a row whose value is part of its key: decode and extend alike multiply the
H heads of some tokens with rows of 576 (640 lanes).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.plan import WritePlan
from jaxserve.kernels.pallas.tpu.tuning import PassShape, TpuConfig, config_of
from jaxserve.kernels.pallas.tpu.write import write_rows
from jaxserve.kernels.rotary import quantize_rows


def mla_config(
    num_heads: int,
    layout: RowLayout,
    page_size: int,
    dtype: str,
    kv_dtype: str,
    device_kind: str,
) -> TpuConfig:
    """Heads are those of one shard; the cache is the same on all of them."""
    decode, extend = (PassShape(layout, num_heads, 1, page_size, dtype, kv_dtype, is_decode) for is_decode in (True, False))
    return config_of(decode, extend, device_kind)


def write_latents(
    pool: jax.Array,
    scales: jax.Array | None,
    latents: jax.Array,
    rotated_keys: jax.Array,
    plan: WritePlan,
    page_offset: jax.typing.ArrayLike,
    *,
    interpret: Any = False,
    checked: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """latents [T, latent_dim] and rotated_keys [T, rope_dim] into pool [P, 1, page_size, width], in place. A quantized pool has
    scales float32 [P, 2, page_size]: one per token, kept twice, for its row as key and as value."""
    layout = RowLayout.latent(latents.shape[1], rotated_keys.shape[1])
    rows = jnp.concatenate([latents, rotated_keys], axis=1)[:, None]
    row_scales = None
    if scales is not None:
        rows, scale = quantize_rows(rows, pool.dtype)
        row_scales = jnp.concatenate([scale, scale], axis=1)
    rows = jnp.pad(rows.astype(pool.dtype), ((0, 0), (0, 0), (0, layout.width - layout.key_dim)))
    return write_rows(pool, scales, rows, row_scales, plan, page_offset, interpret=interpret, checked=checked)
