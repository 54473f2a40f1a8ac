"""Steps of paged attention for tests, and what they must give: a plain NumPy oracle in float64.

A step is described by its rows, (query_len, kv_len) each. Everything that no query may look at is NaN: pages that belong to
nobody or that are behind the windows of all queries, what lies behind the end of a row's last page, padding tokens; and the
page-table entries of such pages and past the end are nonsense.
Backends are driven through AttentionBackend only, so that one list of cases serves all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.api import AttentionBackend, AttentionMetadata, AttentionSpec, Chip

# What makes a backend: a backend's class, or a function that adds its tuning.
Bind = Callable[[AttentionSpec], AttentionBackend]

GARBAGE = np.array([2**31 - 1, -1, -(2**31), 1 << 30], np.int32)
NO_SLOT = 1 << 30


@dataclasses.dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclasses.dataclass(frozen=True)
class Step:
    """Rows, the pages that hold them, and their keys and values; the step's own are not in the pool yet."""

    heads: Heads
    page_size: int
    rows: tuple[tuple[int, int], ...]  # (query_len, kv_len); (0, 0) for padding rows
    decode_q_len: int | None  # as AttentionMetadata has it
    num_pages: int  # of one layer
    page_table: np.ndarray  # int32 [R, max_pages]
    keys: list[np.ndarray]  # per row [kv_len, Hkv, D]
    values: list[np.ndarray]
    q: np.ndarray  # [T, Hq, D]
    token_rows: np.ndarray  # int [T] row of each token, -1 for padding
    token_positions: np.ndarray  # int [T]

    @property
    def is_live(self) -> np.ndarray:
        return self.token_rows >= 0

    def plan_arguments(self) -> dict[str, jax.Array]:
        page_index, offsets = np.divmod(self.token_positions, self.page_size)
        pages = np.where(self.is_live, self.page_table[self.token_rows, page_index], NO_SLOT)
        arrays = {
            "kv_lens": np.array([kv_len for _, kv_len in self.rows]),
            "cu_q_lens": np.cumsum([0, *(query_len for query_len, _ in self.rows)]),
            "page_table": self.page_table,
            "slot_pages": pages,
            "slot_offsets": offsets,
        }
        return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}

    def new(self, per_row: list[np.ndarray]) -> np.ndarray:
        """Keys or values of the step's tokens, [T, Hkv, D]; NaN for padding."""
        result = np.full((len(self.token_rows), self.heads.kv, self.heads.dim), np.nan, np.float32)
        for token in np.flatnonzero(self.is_live):
            result[token] = per_row[self.token_rows[token]][self.token_positions[token]]
        return result

    def before(self, num_tokens: int) -> Step:
        """The step that filled the cache with what precedes this one, padded to a multiple of `num_tokens`."""
        cached = [kv_len - query_len for query_len, kv_len in self.rows]
        return self._with_tokens([(n, n) for n in cached], -(-sum(cached) // num_tokens) * num_tokens)

    def behind(self, window: int) -> Step:
        """The same, without the pages that no query sees through a window of so many tokens."""
        table, kv = self.page_table.copy(), ([x.copy() for x in self.keys], [x.copy() for x in self.values])
        for row, (query_len, kv_len) in enumerate(self.rows):
            first_page = max(kv_len - query_len - window + 1, 0) // self.page_size if query_len else 0
            table[row, :first_page] = GARBAGE[0]
            for x in kv:
                x[row][: first_page * self.page_size] = np.nan
        return dataclasses.replace(self, page_table=table, keys=kv[0], values=kv[1])

    def _with_tokens(self, rows: Sequence[tuple[int, int]], num_tokens: int) -> Step:
        token_rows, token_positions = _place(rows, num_tokens, decode_q_len=None)
        q = np.zeros((num_tokens, self.heads.query, self.heads.dim), np.float32)
        return dataclasses.replace(
            self, rows=tuple(rows), decode_q_len=None, q=q, token_rows=token_rows, token_positions=token_positions
        )


def make_step(
    rows: Sequence[tuple[int, int]],
    heads: Heads,
    *,
    page_size: int = 4,
    num_tokens: int | None = None,
    max_pages: int | None = None,
    num_pages: int | None = None,
    decode_q_len: int | None = None,
    seed: int = 0,
) -> Step:
    """Draws a step. With `decode_q_len` K, rows are (1 to K, n) or (0, 0), in any order."""
    rng = np.random.default_rng(seed)
    T = len(rows) * decode_q_len if decode_q_len else num_tokens or sum(query_len for query_len, _ in rows)
    pages_per_row = [-(-kv_len // page_size) for _, kv_len in rows]
    num_pages = num_pages or sum(pages_per_row) + 3
    free = rng.permutation(num_pages)
    table = rng.choice(GARBAGE, (len(rows), max_pages or max(pages_per_row)))
    for row, count in enumerate(pages_per_row):
        table[row, :count], free = free[:count], free[count:]
    token_rows, token_positions = _place(rows, T, decode_q_len)
    q = rng.standard_normal((T, heads.query, heads.dim)).astype(np.float32)
    q[token_rows < 0] = np.nan
    kv = [rng.standard_normal((2, kv_len, heads.kv, heads.dim)).astype(np.float32) for _, kv_len in rows]
    keys, values = [k for k, _ in kv], [v for _, v in kv]
    return Step(heads, page_size, tuple(rows), decode_q_len, num_pages, table, keys, values, q, token_rows, token_positions)


def _place(rows: Sequence[tuple[int, int]], num_tokens: int, decode_q_len: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Row (-1 for padding) and position of each token."""
    token_rows, token_positions = np.full(num_tokens, -1), np.zeros(num_tokens, int)
    token = 0
    for row, (query_len, kv_len) in enumerate(rows):
        first = row * decode_q_len if decode_q_len else token
        slots = slice(first, first + query_len)
        token_rows[slots] = row
        token_positions[slots] = np.arange(kv_len - query_len, kv_len)
        token += query_len
    assert token <= num_tokens, f"{token} tokens in {num_tokens} slots"
    return token_rows, token_positions


def rounded(step: Step, dtype: Any) -> Step:
    """The step with values that `dtype` can hold, so that the oracle starts from the same numbers."""

    def round_(x: np.ndarray) -> np.ndarray:
        return x.astype(jnp.dtype(dtype)).astype(np.float32)

    return dataclasses.replace(
        step, q=round_(step.q), keys=[round_(k) for k in step.keys], values=[round_(v) for v in step.values]
    )


def spec_of(step: Step, dtype: Any, chip: Chip = Chip("cpu"), **more: Any) -> AttentionSpec:
    name = jnp.dtype(dtype).name
    heads = step.heads
    fields = {"kv_dtype": name, "page_size": step.page_size, **more}
    return AttentionSpec(chip, heads.query, heads.kv, heads.dim, name, **fields)


def not_causal(bind: Bind) -> Bind:
    """The backend as encoders have it."""
    return lambda spec: bind(dataclasses.replace(spec, is_causal=False))


def batch_invariant(bind: Bind) -> Bind:
    """The backend as --enable-deterministic-inference has it."""
    return lambda spec: bind(dataclasses.replace(spec, batch_invariant=True))


# Steps of 96 tokens and four rows in which one sequence of 70 tokens comes whole, in its end, or with its last token alone,
# beside others that are nobody's twice: (rows, the sequence's).
COMPOSITIONS: tuple[tuple[tuple[tuple[int, int], ...], int], ...] = (
    (((70, 70), (0, 0), (0, 0), (0, 0)), 0),
    (((5, 9), (1, 70), (33, 40), (1, 3)), 1),
    (((20, 20), (1, 1), (50, 70), (2, 90)), 2),
    (((1, 70), (0, 0), (0, 0), (0, 0)), 0),
)


def assert_same_bits(bind: Bind, heads: Heads, page_sizes: Sequence[int], dtype: Any = jnp.float32, **options: Any) -> None:
    """What the sequence's queries get is the same in all COMPOSITIONS, with all page sizes."""
    rng = np.random.default_rng(7)
    keys, values = rng.standard_normal((2, 70, heads.kv, heads.dim)).astype(np.float32)
    queries = rng.standard_normal((70, heads.query, heads.dim)).astype(np.float32)
    whole: np.ndarray | None = None
    for page_size in page_sizes:
        for seed, (rows, own) in enumerate(COMPOSITIONS):
            step = make_step(rows, heads, page_size=page_size, num_tokens=96, seed=seed)
            step.keys[own], step.values[own] = keys, values
            step.q[step.token_rows == own] = queries[70 - rows[own][0] :]
            found = run(batch_invariant(bind), rounded(step, dtype), dtype, **options)[step.token_rows == own]
            whole = found if whole is None else whole
            np.testing.assert_array_equal(found, whole[-len(found) :], err_msg=f"pages of {page_size}, {rows}")


def nan_pool(backend: AttentionBackend, num_pages: int) -> Any:
    """The KV cache, all of it NaN (255 where it holds no floats)."""

    def nans(page: Any) -> jax.Array:
        dtype = jnp.dtype(page.dtype)
        poison = np.full(num_pages * page.nbytes, 0xFF, np.uint8)
        return jnp.asarray(poison.view(dtype).reshape(num_pages, *page.shape))

    return jax.tree.map(nans, backend.kv_pages())


def pack_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[T, Hq, D] and twice [T, Hkv, D] as a model's projection gives them: [T, Hkv, G + 2, D]."""
    T, Hkv, D = k.shape
    return jnp.concatenate([q.reshape(T, Hkv, -1, D), k[:, :, None], v[:, :, None]], axis=2)


def write(
    backend: AttentionBackend, pool: Any, k: jax.Array, v: jax.Array, metadata: AttentionMetadata, page_offset: Any
) -> Any:
    """Only keys and values, as they are."""
    return backend.rope_and_write(pack_qkv(k[:, :0], k, v), None, pool, metadata, page_offset)[1]


@functools.partial(jax.jit, static_argnames="backend", donate_argnames="pool")
def fill(backend: AttentionBackend, pool: Any, k: jax.Array, v: jax.Array, offset: Any, arguments: Any) -> Any:
    return write(backend, pool, k, v, backend.plan(AttentionMetadata(**arguments, decode_q_len=None)), offset)


@functools.partial(jax.jit, static_argnames=("backend", "decode_q_len", "scale", "soft_cap", "static_window"))
def attend(
    backend: AttentionBackend,
    pool: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_offset: jax.Array,
    arguments: dict[str, jax.Array],
    decode_q_len: int | None,
    scale: float,
    sliding_window: jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    static_window: int | None = None,
) -> tuple[jax.Array, Any]:
    """One layer of a model: plan, write, attend. The result, and the pool. `static_window` is for backends that want an int."""
    metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))
    q, pool = backend.rope_and_write(pack_qkv(q, k, v), None, pool, metadata, page_offset)
    window = sliding_window if static_window is None else static_window
    out = backend.ragged_paged_attention(
        q, pool, metadata, page_offset, scale=scale, sliding_window=window, soft_cap=soft_cap, sinks=sinks
    )
    return out, pool


def run(bind: Bind, step: Step, dtype: Any = jnp.float32, *, num_layers: int = 1, layer: int = 0, **options: Any) -> np.ndarray:
    """The step's result as float32 [T, Hq, D], from a pool that holds nothing but what the step may see."""
    options.setdefault("scale", step.heads.dim**-0.5)
    offset = jnp.int32(layer * step.num_pages)
    backend = bind(spec_of(step, dtype))
    pool = nan_pool(backend, num_layers * step.num_pages)
    window = options.get("static_window", options.get("sliding_window"))
    seen = step if window is None else step.behind(int(window))
    before = dataclasses.replace(seen, page_table=step.page_table).before(256)
    if len(before.token_rows):
        k, v = (jnp.asarray(before.new(x), dtype) for x in (seen.keys, seen.values))
        pool = fill(backend, pool, k, v, offset, before.plan_arguments())
    q, k, v = (jnp.asarray(x, dtype) for x in (step.q, step.new(step.keys), step.new(step.values)))
    out, _ = attend(backend, pool, q, k, v, offset, seen.plan_arguments(), step.decode_q_len, **options)
    assert out.dtype == dtype, out.dtype
    return np.asarray(out.astype(jnp.float32))


def expected(
    step: Step,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    is_causal: bool = True,
) -> np.ndarray:
    """Attention by definition, one token and head at a time, in float64: [T, Hq, D], zeros for padding."""
    group = step.heads.query // step.heads.kv
    scale = step.heads.dim**-0.5 if scale is None else scale
    out = np.zeros(step.q.shape)
    for token in np.flatnonzero(step.is_live):
        row, position = step.token_rows[token], step.token_positions[token]
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        end = position + 1
        if not is_causal:
            kv_len = step.rows[row][1]
            end = kv_len if sliding_window is None else min(kv_len, position + sliding_window)
        keys, values = (x[row][first:end].astype(np.float64) for x in (step.keys, step.values))
        for head in range(step.heads.query):
            scores = keys[:, head // group] @ step.q[token, head].astype(np.float64) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = [] if sinks is None else [sinks[head]]
            weights = np.exp(np.append(scores, sink) - max([*scores, *sink]))
            out[token, head] = weights[: len(scores)] @ values[:, head // group] / weights.sum()
    return out
