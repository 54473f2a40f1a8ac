"""Ragged paged attention of prompts and chunks on Hopper GPUs: rows of many queries against a cached prefix and themselves.

`plan_extend` cuts a step's tokens into tiles once, longest context first; all layers share the list. A tile is consecutive
tokens of one row times query heads that share a KV head, always 64 rows of scores per consumer, so that a row of few new
tokens on a long prefix still fills the tensor cores' 64-row products. Padding tokens are tiles that see no key and give zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.pallas.gpu import dequant
from jaxserve.kernels.pallas.gpu.common import ROW_GROUP, round_up
from jaxserve.kernels.pallas.gpu.extend_kernel import extend_kernel
from jaxserve.kernels.pallas.gpu.extend_load import MIN_QUANTIZED_PAGE
from jaxserve.kernels.pallas.gpu.extend_plan import ExtendConfig, ExtendPlan, padded_tokens, plan_extend
from jaxserve.kernels.pallas.gpu.extend_tile import Shape
from jaxserve.kernels.pallas.gpu.softmax import Scoring

__all__ = ["ExtendConfig", "ExtendPlan", "extend_with_log_sums", "paged_extend", "plan_extend", "ragged_extend", "unsupported"]


def unsupported(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
    kv_dtype: Any,
    head_dim_v: int | None = None,
    config: ExtendConfig | None = None,
) -> str | None:
    """Why paged_extend cannot do this, as a sentence; None if it can. Heads are those of one shard."""
    head_dim_v, dtype, kv_dtype = head_dim_v or head_dim, jnp.dtype(dtype), jnp.dtype(kv_dtype)
    is_quantized = dequant.is_quantized(kv_dtype)
    config = config or ExtendConfig.for_heads(head_dim, head_dim_v, is_quantized=is_quantized)
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads."
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"wgmma multiplies bfloat16 and float16, not {dtype.name}."
    if kv_dtype != dtype and not is_quantized:
        return f"KV of {kv_dtype.name} does not go with queries of {dtype.name}."
    if head_dim % 16 or head_dim_v % 16 or not 64 <= head_dim_v <= head_dim <= 256:
        return f"head_dim {head_dim} with values of {head_dim_v}: multiples of 16 are needed, 64 <= values <= head_dim <= 256."
    smallest = MIN_QUANTIZED_PAGE if is_quantized else ROW_GROUP
    if page_size < smallest or (config.block_kv % page_size and page_size % config.block_kv):
        return (
            f"page size {page_size} with {kv_dtype.name} KV: at least {smallest}, and a divisor or multiple of the tile's "
            f"{config.block_kv} is needed."
        )
    reason = config.problem(head_dim, head_dim_v, is_quantized)
    return reason and f"{reason}."


def paged_extend(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table: jax.Array,
    plan: ExtendPlan,
    page_offset: jax.typing.ArrayLike,
    *,
    head_dim_v: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    config: ExtendConfig,
    interpret: Any = None,
) -> jax.Array:
    """Causal attention of q [T, Hq, Dk] over pages: [T, Hq, Dv].

    pool [P, Hkv, page_size, Dk + Dv]; scales float32 [P, Hkv, 2, page_size] if it is quantized; page_table int32
    [R, max_pages]; page_offset int32 scalar, added to page ids.
    Tokens without a tile (rows below the plan's min_q_len) are left unspecified; padding tokens give zeros.
    """
    assert plan.places is None, "the plan is for extend_with_log_sums"
    return _paged(
        q, pool, scales, page_table, plan, page_offset, head_dim_v, Scoring(scale, soft_cap), sliding_window, sinks, config,
        interpret,
    )[0]  # fmt: skip


def extend_with_log_sums(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    plan: ExtendPlan,
    page_offset: jax.typing.ArrayLike,
    *,
    head_dim_v: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    config: ExtendConfig,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The same with what results over chunks of a row's keys are merged by; the plan is made with log sums, too.

    float32 [T, Hq]: of the keys that a query sees, the natural logarithm of the sum of exp(score); softmax.LOWEST where it
    sees none.
    """
    assert plan.places is not None, "the plan was made without log sums"
    out, log_sums = _paged(
        q, pool, None, page_table, plan, page_offset, head_dim_v, Scoring(scale, soft_cap), sliding_window, None, config,
        interpret,
    )  # fmt: skip
    by_head = log_sums.reshape(-1, q.shape[1], plan.tile_tokens)  # of a tile all heads, one behind the other
    return out, by_head.swapaxes(1, 2).reshape(-1, q.shape[1])[plan.places]


def _paged(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table: jax.Array,
    plan: ExtendPlan,
    page_offset: jax.typing.ArrayLike,
    head_dim_v: int,
    scoring: Scoring,
    sliding_window: int | None,
    sinks: jax.Array | None,
    config: ExtendConfig,
    interpret: Any,
) -> list[jax.Array]:
    shape = Shape(
        num_q_heads=q.shape[1],
        num_kv_heads=pool.shape[1],
        head_dim=q.shape[2],
        head_dim_v=head_dim_v,
        page_size=pool.shape[2],
        dtype=q.dtype,
        kv_dtype=pool.dtype,
        scoring=scoring,
        sliding_window=sliding_window,
        has_sinks=sinks is not None,
        has_positions=plan.has_positions,
        has_log_sums=plan.places is not None,
        is_interpreted=interpret is not None,
        config=config,
    )
    assert shape.is_quantized == (scales is not None), f"a pool of {pool.dtype} and scales: {scales is not None}"
    kv = [pool, page_table, jnp.reshape(page_offset, (1,)).astype(jnp.int32), *([] if scales is None else [scales])]
    return _call(shape, q, plan, kv, sinks, interpret)


def ragged_extend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    plan: ExtendPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    config: ExtendConfig,
    interpret: Any = None,
) -> jax.Array:
    """The same over contiguous keys [S, Hkv, Dk] and values [S, Hkv, Dv]; the plan is made with cu_kv_lens."""
    shape = Shape(
        num_q_heads=q.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=q.shape[2],
        head_dim_v=values.shape[2],
        page_size=None,
        dtype=q.dtype,
        kv_dtype=keys.dtype,
        scoring=Scoring(scale, soft_cap),
        sliding_window=sliding_window,
        has_sinks=sinks is not None,
        has_positions=plan.has_positions,
        has_log_sums=False,
        is_interpreted=interpret is not None,
        config=config,
    )
    padded = max(config.block_kv, round_up(keys.shape[0], ROW_GROUP))
    (out,) = _call(shape, q, plan, [_pad(keys, padded), _pad(values, padded)], sinks, interpret)
    return out


def _call(
    shape: Shape, q: jax.Array, plan: ExtendPlan, kv: list[jax.Array], sinks: jax.Array | None, interpret: Any
) -> list[jax.Array]:
    """The result, and log sums if the shape has them, as the kernel writes them."""
    assert plan.tile_tokens == shape.tokens, (
        f"the plan's tiles are of {plan.tile_tokens} tokens, the kernel's of {shape.tokens}"
    )
    num_tokens = q.shape[0]
    padded = padded_tokens(num_tokens, shape.tokens)
    kernel = extend_kernel(shape, padded, plan.tiles.shape[0], interpret)
    inputs = [_pad(q, padded), plan.tiles, plan.ends, *kv]
    out, *log_sums = kernel(*inputs, *([] if sinks is None else [sinks.astype(jnp.float32)]))
    return [out[:num_tokens], *log_sums]


def _pad(x: jax.Array, length: int) -> jax.Array:
    return x if x.shape[0] == length else jnp.pad(x, ((0, length - x.shape[0]), (0, 0), (0, 0)))
