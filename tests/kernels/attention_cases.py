"""Steps of paged attention for tests, and what they must give: a plain NumPy oracle in float64.

A step is described by its rows, (query_len, kv_len) each. Everything that no query may look at is NaN: pages that belong to
nobody, what lies behind the end of a row's last page, padding tokens; and page-table entries past the end are nonsense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.api import AttentionBackend, AttentionMetadata

GARBAGE = (2**31 - 1, -1, -(2**31), 1 << 30)


@dataclasses.dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as a backend gets it, and what it was made from. New keys and values are not in the pool yet."""

    heads: Heads
    page_size: int
    rows: tuple[tuple[int, int], ...]  # (query_len, kv_len); (0, 0) for padding rows
    decode_only: bool
    page_table: np.ndarray  # int32 [R, max_pages]
    num_pages: int  # of one layer
    keys: list[np.ndarray]  # per row [kv_len, Hkv, D]
    values: list[np.ndarray]
    q: np.ndarray  # [T, Hq, D]
    token_rows: np.ndarray  # [T] row of each token, -1 for padding
    token_positions: np.ndarray  # [T]

    @property
    def kv_lens(self) -> np.ndarray:
        return np.array([kv_len for _, kv_len in self.rows], np.int32)

    @property
    def cu_q_lens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([query_len for query_len, _ in self.rows])]).astype(np.int32)

    def new(self, per_row: list[np.ndarray]) -> np.ndarray:
        """Keys or values of the step's tokens, [T, Hkv, D], NaN for padding."""
        result = np.full((len(self.token_rows), self.heads.kv, self.heads.dim), np.nan, np.float32)
        for token, (row, position) in enumerate(zip(self.token_rows, self.token_positions, strict=True)):
            if row >= 0:
                result[token] = per_row[row][position]
        return result


def make_step(
    rows: Sequence[tuple[int, int]],
    heads: Heads,
    *,
    page_size: int = 4,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    max_pages: int | None = None,
    decode_only: bool = False,
    seed: int = 0,
) -> Step:
    """Draws a step. With `decode_only`, rows may be (1, n) or (0, 0), in any order."""
    rng = np.random.default_rng(seed)
    rows = tuple(rows) + ((0, 0),) * ((num_rows or len(rows)) - len(rows))
    live = sum(query_len for query_len, _ in rows)
    T = len(rows) if decode_only else max(num_tokens or live, 1)
    assert live <= T, (live, T)
    pages_per_row = [-(-kv_len // page_size) for _, kv_len in rows]
    num_pages = sum(pages_per_row) + 3
    max_pages = max(max_pages or 0, *pages_per_row, 1)
    free = list(rng.permutation(num_pages))
    table = rng.choice(np.array(GARBAGE), (len(rows), max_pages)).astype(np.int32)
    token_rows, token_positions = np.full(T, -1), np.zeros(T, np.int64)
    token = 0
    for row, (query_len, kv_len) in enumerate(rows):
        table[row, : pages_per_row[row]] = [free.pop() for _ in range(pages_per_row[row])]
        start = row if decode_only else token
        token_rows[start : start + query_len] = row
        token_positions[start : start + query_len] = np.arange(kv_len - query_len, kv_len)
        token += query_len
    draw = [rng.standard_normal((2, kv_len, heads.kv, heads.dim)).astype(np.float32) for _, kv_len in rows]
    q = rng.standard_normal((T, heads.query, heads.dim)).astype(np.float32)
    q[token_rows < 0] = np.nan
    keys, values = [kv[0] for kv in draw], [kv[1] for kv in draw]
    return Step(
        heads, page_size, rows, decode_only, table, num_pages, keys, values, q, token_rows, token_positions
    )  # fmt: skip


def round_to(step: Step, dtype: Any) -> Step:
    """The step with values that `dtype` can hold, so that the oracle starts from the same numbers."""
    rounded = lambda x: np.asarray(jnp.asarray(x, dtype), np.float32)  # noqa: E731
    return dataclasses.replace(
        step, q=rounded(step.q), keys=[rounded(k) for k in step.keys], values=[rounded(v) for v in step.values]
    )


def plan(backend: AttentionBackend, step: Step) -> AttentionMetadata:
    live = step.token_rows >= 0
    page_index, offsets = np.divmod(step.token_positions, step.page_size)
    pages = np.where(live, step.page_table[step.token_rows, page_index], 1 << 30)
    return backend.plan(
        kv_lens=jnp.asarray(step.kv_lens),
        cu_q_lens=jnp.asarray(step.cu_q_lens),
        page_table=jnp.asarray(step.page_table),
        slot_pages=jnp.asarray(pages, jnp.int32),
        slot_offsets=jnp.asarray(offsets, jnp.int32),
        decode_only=step.decode_only,
    )


def make_pool(
    backend: AttentionBackend, step: Step, dtype: Any = jnp.float32, *, num_layers: int = 1, layer: int = 0
) -> jax.Array:
    """A pool whose layer `layer` holds the rows' tokens of earlier steps; NaN everywhere else.

    Filled through the backend's own write_kv, one step of all cached tokens, so that no layout is assumed here.
    """
    shape = backend.kv_page_shape(step.heads.kv, step.heads.dim, step.page_size)
    nan = jnp.full((num_layers * step.num_pages, *shape), jnp.nan, dtype)
    storage = backend.kv_storage_dtype(dtype, "cpu")
    pool = nan if jnp.dtype(storage) == jnp.dtype(dtype) else jax.lax.bitcast_convert_type(nan, storage)
    cached = dataclasses.replace(
        step,
        rows=tuple((kv_len - query_len, kv_len - query_len) for query_len, kv_len in step.rows),
        decode_only=False,
        token_rows=np.concatenate([np.full(kv_len - query_len, r) for r, (query_len, kv_len) in enumerate(step.rows)] or [[]]),
        token_positions=np.concatenate([np.arange(kv_len - query_len) for query_len, kv_len in step.rows] or [[]]),
    )
    cached = dataclasses.replace(
        cached, token_rows=cached.token_rows.astype(int), token_positions=cached.token_positions.astype(int)
    )
    if not len(cached.token_rows):
        return pool
    k, v = jnp.asarray(cached.new(step.keys), dtype), jnp.asarray(cached.new(step.values), dtype)
    return backend.write_kv(pool, k, v, plan(backend, cached), layer * step.num_pages)


def run(
    backend: AttentionBackend, step: Step, dtype: Any = jnp.float32, *, num_layers: int = 1, layer: int = 0, **options: Any
) -> np.ndarray:
    """The step as a model runs it, jitted: plan, write, attend. float32 [T, Hq, D]."""
    options.setdefault("scale", step.heads.dim**-0.5)

    @jax.jit
    def attend(pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, page_offset: jax.Array) -> jax.Array:
        metadata = plan(backend, step)
        pool = backend.write_kv(pool, k, v, metadata, page_offset)
        return backend.ragged_paged_attention(q, pool, metadata, page_offset, **options)

    pool = make_pool(backend, step, dtype, num_layers=num_layers, layer=layer)
    new = (jnp.asarray(x, dtype) for x in (step.q, step.new(step.keys), step.new(step.values)))
    out = attend(pool, *new, jnp.int32(layer * step.num_pages))
    assert out.dtype == dtype, out.dtype
    return np.asarray(out, np.float32)


def expect(
    step: Step,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention by definition, one token and head at a time, in float64: [T, Hq, D], zeros for padding."""
    group = step.heads.query // step.heads.kv
    scale = step.heads.dim**-0.5 if scale is None else scale
    out = np.zeros(step.q.shape)
    for token, (row, position) in enumerate(zip(step.token_rows, step.token_positions, strict=True)):
        if row < 0:
            continue
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(step.heads.query):
            keys = step.keys[row][first : position + 1, head // group].astype(np.float64)
            values = step.values[row][first : position + 1, head // group].astype(np.float64)
            scores = keys @ step.q[token, head].astype(np.float64) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            out[token, head] = weights[: len(keys)] @ values / weights.sum()
    return out
