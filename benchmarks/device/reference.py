"""Attention by definition in float32, and steps to check kernels with: random, ragged, and poisoned wherever nobody may look.

Poison: pages that belong to nobody, what lies behind the end of a row's last page, and the scales there are NaN (or the
largest number, for int8 values); page-table entries past a row's end name pages that do not exist.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.inputs import AttentionCase, AttentionInputs
from jaxserve.bench.timing import Rotation

GARBAGE = np.array([2**31 - 1, -1, -(2**31), 1 << 30], np.int32)
SPARE_PAGES = 3  # of nobody
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class CheckStep:
    """A step for a kernel, and what the reference needs of it. The pool holds two layers; the second is the one to read."""

    case: AttentionCase
    inputs: AttentionInputs  # call 1 is the one to make: its page offset is the second layer's
    keys: np.ndarray  # float32 [R, longest, Hkv, Dk] as the pool's values say, scales applied; zeros behind a row's end
    values: np.ndarray  # float32 [R, longest, Hkv, Dv]


def make_step(case: AttentionCase, seed: int, *, padding_tokens: int = 0) -> CheckStep:
    """`padding_tokens` queries (NaN) stand behind the rows'."""
    rng = np.random.default_rng(seed)
    num_pages = case.num_pages + SPARE_PAGES
    table = _page_table(case, num_pages, rng)
    longest = max(kv_len for _, kv_len in case.rows)
    dense = rng.standard_normal((case.num_rows, longest, case.num_kv_heads, case.row_dim), np.float32)
    stored, scales = _stored(case, dense, rng)
    pool, scale_pages = _poisoned_pool(case, stored, scales, table, num_pages)
    exact = stored.astype(np.float32)
    if scales is not None:
        key_and_value = np.repeat(scales, (case.head_dim, case.row_dim - case.head_dim), axis=-1)
        exact = exact * key_and_value
    for row, (_, kv_len) in enumerate(case.rows):
        exact[row, kv_len:] = 0
    q = rng.standard_normal((case.num_tokens + padding_tokens, case.num_heads, case.head_dim), np.float32)
    q[case.num_tokens :] = np.nan
    inputs = AttentionInputs(
        q=jnp.asarray(q, jnp.dtype(case.dtype)),
        pool=jnp.asarray(pool),
        scales=None if scale_pages is None else jnp.asarray(scale_pages),
        sinks=jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.uses_sinks else None,
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray([kv_len for _, kv_len in case.rows], jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *(q_len for q_len, _ in case.rows)]), jnp.int32),
        rotation=Rotation.of(2, num_pages),
    )
    values = exact[..., : case.head_dim_v] if case.value_in_key else exact[..., case.head_dim :]
    return CheckStep(case, inputs, exact[..., : case.head_dim], values)


def _page_table(case: AttentionCase, num_pages: int, rng: np.random.Generator) -> np.ndarray:
    free = rng.permutation(num_pages).astype(np.int32)
    table = rng.choice(GARBAGE, (case.num_rows, max(1, *case.pages_per_row) + 1))
    for row, count in enumerate(case.pages_per_row):
        table[row, :count], free = free[:count], free[count:]
    return table


def _stored(case: AttentionCase, dense: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Values as the pool's type holds them, and their scales [R, tokens, Hkv, 2]."""
    if not case.is_quantized:
        return dense.astype(jnp.dtype(case.kv_dtype)), None
    scales = rng.uniform(0.5, 1.5, (*dense.shape[:3], 2)).astype(np.float32)
    if case.kv_dtype == "int8":
        return np.clip(np.rint(dense * 40), -127, 127).astype(np.int8), scales / 40
    return dense.astype(jnp.dtype(case.kv_dtype)), scales


def _poisoned_pool(
    case: AttentionCase, stored: np.ndarray, scales: np.ndarray | None, table: np.ndarray, num_pages: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Two layers' pages, of which only the second layer's live tokens are numbers."""
    poison = 127 if case.kv_dtype == "int8" else np.nan
    pool = np.full((2 * num_pages, case.num_kv_heads, case.page_size, case.row_dim), poison, stored.dtype)
    pages = np.full((2 * num_pages, case.num_kv_heads, 2, case.page_size), np.nan, np.float32) if scales is not None else None
    for row, (_, kv_len) in enumerate(case.rows):
        page, offset = np.divmod(np.arange(kv_len), case.page_size)
        page = table[row, page] + num_pages
        pool[page, :, offset] = stored[row, :kv_len]
        if pages is not None and scales is not None:
            pages[page, :, :, offset] = scales[row, :kv_len]
    return pool, pages


def expected(step: CheckStep) -> np.ndarray:
    """float32 [T, Hq, Dv]: zeros for padding tokens."""
    case, inputs = step.case, step.inputs
    q_lens = np.array([q_len for q_len, _ in case.rows])
    longest = max(1, int(q_lens.max()))
    in_row = np.arange(longest)
    starts = np.asarray(inputs.cu_q_lens)[:-1]
    token = np.minimum(starts[:, None] + in_row, max(case.num_tokens - 1, 0))
    q = np.asarray(inputs.q.astype(jnp.float32))[token]  # [R, longest, Hq, Dk]
    kv_lens = np.asarray(inputs.kv_lens)
    positions = kv_lens[:, None] - q_lens[:, None] + in_row
    sinks = inputs.sinks if inputs.sinks is not None else jnp.full(case.num_heads, -jnp.inf, jnp.float32)
    result = np.asarray(_attend(q, step.keys, step.values, positions, kv_lens, sinks, case))
    out = np.zeros((inputs.q.shape[0], case.num_heads, case.head_dim_v), np.float32)
    for row, (q_len, _) in enumerate(case.rows):
        out[starts[row] : starts[row] + q_len] = result[row, :q_len]
    return out


@functools.partial(jax.jit, static_argnums=6)
def _attend(q: Any, keys: Any, values: Any, positions: Any, kv_lens: Any, sinks: jax.Array, case: AttentionCase) -> jax.Array:
    """Row after row: [R, Q, Hq, Dv]. `sinks` of -inf are none."""
    group = case.num_heads // case.num_kv_heads

    def row(one: tuple[jax.Array, ...]) -> jax.Array:
        q, keys, values, positions, kv_len = one  # [Q, Hq, Dk], [S, Hkv, Dk], [S, Hkv, Dv], [Q], []
        Q, S = q.shape[0], keys.shape[0]
        grouped = q.reshape(Q, case.num_kv_heads, group, -1)
        scores = jnp.einsum("qhgd,shd->hgqs", grouped, keys, precision=_HIGHEST) * case.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * jnp.tanh(scores / case.soft_cap)
        key_pos = jnp.arange(S)
        visible = key_pos <= (positions[:, None] if case.is_causal else kv_len - 1)
        if case.sliding_window is not None:
            visible &= abs(key_pos - positions[:, None]) < case.sliding_window
        scores = jnp.where(visible, scores, -jnp.inf)
        sink = jnp.broadcast_to(sinks.reshape(case.num_kv_heads, group, 1, 1), (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
        weights = jnp.where(visible, weights, 0.0)
        return jnp.einsum("hgqs,shd->qhgd", weights, values, precision=_HIGHEST).reshape(Q, case.num_heads, -1)

    return jax.lax.map(row, (q, keys, values, positions, kv_lens))
