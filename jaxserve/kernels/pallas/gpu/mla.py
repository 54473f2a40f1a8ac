"""MLA decode on Hopper GPUs, absorbed form: every query head attends to one cached row of latent and rope part per token.

Work is split evenly over blocks whatever the rows' lengths (stream-K): the KV tiles of all rows stand in one line, and each
worker takes an equal stretch of it. A row that several workers share leaves normalised partial results, which a second small
kernel adds up. More than 64 query rows (heads x queries) are cut into blocks; a worker is one thread block per such block, all
of them at the same place in the line, so that their KV comes from DRAM once and from L2 after that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.pallas.gpu.mla_combine import combine_kernel
from jaxserve.kernels.pallas.gpu.mla_kernel import attend_kernel
from jaxserve.kernels.pallas.gpu.mla_plan import (
    LATENT,
    PAGE_SIZES,
    ROPE,
    ROW,
    M,
    MlaConfig,
    MlaPlan,
    Shape,
    plan_mla_decode,
)
from jaxserve.kernels.pallas.gpu.softmax import LOG2E, Scoring

__all__ = [
    "MlaConfig",
    "MlaPlan",
    "group_q_len",
    "mla_decode",
    "mla_decode_with_log_sums",
    "plan_mla_decode",
    "unsupported",
]

MOST_QUERIES = 4


def unsupported(*, num_heads: int, q_len: int, latent_dim: int, row_dim: int, page_size: int, dtype: Any) -> str | None:
    """Why MLA decode can not be had, or None."""
    if (latent_dim, row_dim) != (LATENT, ROW):
        return f"MLA decode needs rows of {LATENT} + {ROPE} values, not {latent_dim} + {row_dim - latent_dim}"
    if num_heads % 8 or not 8 <= num_heads <= 128:
        return f"MLA decode needs 8 to 128 heads per device, a multiple of 8, not {num_heads}"
    if not 1 <= q_len <= MOST_QUERIES:
        return f"MLA decode takes 1 to {MOST_QUERIES} queries per row, not {q_len}"
    if page_size not in PAGE_SIZES:
        return f"page size {page_size} is none of {', '.join(map(str, PAGE_SIZES))}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"MLA decode takes bfloat16 or float16, not {jnp.dtype(dtype).name}; a quantized latent is not supported"
    return None


def group_q_len(num_heads: int) -> int:
    """Queries of one row that fill a product's rows, as far as the kernel takes them."""
    return max(1, min(MOST_QUERIES, M // num_heads))


def mla_decode(q: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
    """Attention of q [R, q_len, H, 576] over the pool's rows, which are keys, and their latent part, which is values: arguments
    as `_decode` has them.

    Query i of a row is at position kv_len - q_len + i. Gives [R, q_len, H, latent_dim] in q's dtype; zeros where kv_len is 0,
    unless the plan has it otherwise, and where a query's position is negative.
    Raises NotImplementedError where `unsupported` has a reason.
    """
    (out,) = _decode(q, *arguments, **options, has_log_sums=False)
    return out


def mla_decode_with_log_sums(q: jax.Array, *arguments: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    """The same of one query per row, with float32 [R, 1, H] natural logarithms of the sums of exp(score), very low where there
    are zeros."""
    assert q.shape[1] == 1, f"{q.shape[1]} queries per row: one of them may see no key, and has no log sum"
    out, logs = _decode(q, *arguments, **options, has_log_sums=True)
    return out, logs / LOG2E


def _decode(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    plan: MlaPlan,
    page_offset: jax.Array,
    *,
    scale: float,
    latent_dim: int = LATENT,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    has_log_sums: bool,
    config: MlaConfig,
    interpret: Any = None,
) -> list[jax.Array]:
    """pool [P, 1, page_size, 576], page_table int32 [rows of the table, max_pages], page_offset int32 scalar, added to page
    ids. Log sums are to base 2."""
    num_rows, q_len, num_heads, row_dim = q.shape
    page_size = pool.shape[2]
    reason = unsupported(
        num_heads=num_heads, q_len=q_len, latent_dim=latent_dim, row_dim=row_dim, page_size=page_size, dtype=pool.dtype
    )
    if reason is not None:
        raise NotImplementedError(reason)
    assert q.dtype == pool.dtype and pool.shape[1:] == (1, page_size, ROW), f"q {q.dtype}, pool {pool.dtype}{pool.shape}"
    assert plan.sliding_window == sliding_window, f"the plan is for the window {plan.sliding_window}, not {sliding_window}"
    s = Shape(
        num_rows, plan.combined.shape[0], q_len, num_heads, page_size, plan.workers.shape[0], q.dtype, Scoring(scale, soft_cap),
        sliding_window, has_log_sums, interpret is not None, config,
    )  # fmt: skip
    offset = jnp.reshape(page_offset, (1,)).astype(jnp.int32)
    blocked = q.reshape(num_rows, s.blocks, s.m, row_dim)
    out, parts, part_logs, *logs = attend_kernel(s, interpret)(plan.rows, plan.workers, blocked, pool, page_table, offset)
    results = [jax.new_ref(x) for x in (out, *logs)]
    combine_kernel(s, interpret)(plan.rows, plan.combined, parts, part_logs, *results)
    out, *logs = [jax.freeze(x) for x in results]
    shape = (num_rows, q_len, num_heads)
    return [out.reshape(*shape, latent_dim), *(x[..., : s.m].reshape(shape) for x in logs)]
