"""Attention cases to time: their shapes, the bytes and operations they must cost, and their arrays on the device.

The KV pool follows the GPU kernels' contract: [P, Hkv, page_size, row], a token's row of one KV head being its key and then its
value (for MLA its latent vector, of which the value is a part), with scales float32 [P, Hkv, 2, page_size] if it is quantised.
The TPU kernels' pool differs by gaps in a row alone, and their scales by a reshape.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.timing import Rotation, copies_needed
from jaxserve.kernels.spec import QUANTIZED_DTYPES

# Rates for guessing how long a case takes, to choose how often to run it. They appear in no result.
_GUESSED_BYTES_PER_US = 3e6
_GUESSED_FLOP_PER_US = 400e6
_GUESSED_LAUNCH_US = 8.0
# Random pages are drawn for this many bytes and repeated: what is read is not cached, since addresses differ.
_BLOCK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Rows of (queries, tokens in the cache with them), and the heads of one shard."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    uses_sinks: bool = False
    value_in_key: bool = False  # MLA: a row is the key, the value its first head_dim_v numbers
    is_causal: bool = True  # else rows are whole texts; within a window a query sees as many keys behind it as before it

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(q_len for q_len, _ in self.rows)

    @property
    def max_q_len(self) -> int:
        return max(q_len for q_len, _ in self.rows)

    @property
    def query_slots(self) -> np.ndarray | None:
        """Where the queries stand among max_q_len places for each row; None where they fill them all."""
        places = np.arange(self.max_q_len) < np.array([q_len for q_len, _ in self.rows])[:, None]
        return None if places.all() else np.flatnonzero(places)

    @property
    def row_dim(self) -> int:
        """Numbers that a token takes in the pool, per KV head."""
        return self.head_dim if self.value_in_key else self.head_dim + self.head_dim_v

    @property
    def is_quantized(self) -> bool:
        return self.kv_dtype in QUANTIZED_DTYPES

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def pages_per_row(self) -> tuple[int, ...]:
        return tuple(-(-kv_len // self.page_size) for _, kv_len in self.rows)

    @property
    def num_pages(self) -> int:
        return sum(self.pages_per_row)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that some query sees, each read once."""
        tokens = sum(self._seen_tokens(q_len, kv_len) for q_len, kv_len in self.rows)
        scales = 8 if self.is_quantized else 0
        return tokens * self.num_kv_heads * (self.row_dim * jnp.dtype(self.kv_dtype).itemsize + scales)

    @property
    def nbytes(self) -> int:
        """The fewest bytes to move: keys and values, queries, the result."""
        per_token = self.num_heads * (self.head_dim + self.head_dim_v) * jnp.dtype(self.dtype).itemsize
        return self.kv_bytes + self.num_tokens * per_token

    @property
    def flop(self) -> int:
        """Of the two matrix products, for the pairs of query and key that attention sees."""
        pairs = sum(self._pairs(q_len, kv_len) for q_len, kv_len in self.rows)
        return 2 * pairs * self.num_heads * (self.head_dim + self.head_dim_v)

    @property
    def expected_us(self) -> float:
        return _GUESSED_LAUNCH_US + max(self.nbytes / _GUESSED_BYTES_PER_US, self.flop / _GUESSED_FLOP_PER_US)

    def _seen_tokens(self, q_len: int, kv_len: int) -> int:
        return kv_len if self.sliding_window is None else min(kv_len, q_len + self.sliding_window - 1)

    def _pairs(self, q_len: int, kv_len: int) -> int:
        before = np.arange(kv_len - q_len, kv_len, dtype=np.int64)  # of each query
        behind = kv_len - 1 - before if not self.is_causal else np.zeros_like(before)
        if self.sliding_window is not None:
            before, behind = (np.minimum(keys, self.sliding_window - 1) for keys in (before, behind))
        return int(np.sum(before + 1 + behind))


def decode_case(batch: int, context: int, q_len: int = 1, **shape: Any) -> AttentionCase:
    """`batch` rows of `context` tokens, the last `q_len` of which are the queries."""
    return AttentionCase(rows=((q_len, context),) * batch, **shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    q: jax.Array  # [T, Hq, Dk]
    pool: jax.Array  # [P, Hkv, page_size, row]
    scales: jax.Array | None  # float32 [P, Hkv, 2, page_size]
    sinks: jax.Array | None  # float32 [Hq]
    page_table: jax.Array  # int32 [R, max_pages] pages of the first copy, in random order
    kv_lens: jax.Array  # int32 [R]
    cu_q_lens: jax.Array  # int32 [R + 1]
    rotation: Rotation  # page offset of each call: another copy than the calls before


def make_inputs(case: AttentionCase, calls: int, seed: int = 0, row_dim: int | None = None) -> AttentionInputs:
    """Random arrays, with as many copies of the pages as a cold L2 needs. `row_dim`: of the pool's rows, if not the case's."""
    copies = min(copies_needed(case.kv_bytes), calls)
    rng = np.random.default_rng(seed)
    pool, scales = _random_pool(case, copies * case.num_pages, row_dim or case.row_dim, seed)
    key = jax.random.key(seed)
    q_lens = [q_len for q_len, _ in case.rows]
    return AttentionInputs(
        q=jax.random.normal(key, (case.num_tokens, case.num_heads, case.head_dim), jnp.dtype(case.dtype)),
        pool=pool,
        scales=scales,
        sinks=jax.random.normal(key, (case.num_heads,), jnp.float32) if case.uses_sinks else None,
        page_table=jnp.asarray(random_page_table(case.pages_per_row, rng)),
        kv_lens=jnp.asarray([kv_len for _, kv_len in case.rows], jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        rotation=Rotation.of(copies, case.num_pages),
    )


def random_page_table(pages_per_row: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """int32 [R, max_pages]: every page of 0 .. sum - 1 once; past a row's end the largest int32, never to be followed."""
    order = rng.permutation(sum(pages_per_row)).astype(np.int32)
    table = np.full((len(pages_per_row), max(1, *pages_per_row)), np.iinfo(np.int32).max, np.int32)
    start = 0
    for row, count in enumerate(pages_per_row):
        table[row, :count] = order[start : start + count]
        start += count
    return table


def _random_pool(case: AttentionCase, num_pages: int, row_dim: int, seed: int) -> tuple[jax.Array, jax.Array | None]:
    page_shape = (case.num_kv_heads, case.page_size, row_dim)
    pool = random_array((num_pages, *page_shape), case.kv_dtype, seed)
    if not case.is_quantized:
        return pool, None
    # So that stored value times scale is of order 1.
    unit = 1 / 64 if case.kv_dtype == "int8" else 1.0
    scale_shape = (pool.shape[0], case.num_kv_heads, 2, case.page_size)
    return pool, jax.random.uniform(jax.random.key(seed + 1), scale_shape, jnp.float32, 0.5 * unit, 1.5 * unit)


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """At least `shape[0]` long, normally distributed, and as quickly made as a large array can be."""
    row_bytes = math.prod(shape[1:]) * jnp.dtype(dtype).itemsize
    block = min(shape[0], max(1, _BLOCK_BYTES // row_bytes))
    return repeated_blocks((block, *shape[1:]), dtype, -(-shape[0] // block), seed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def repeated_blocks(shape: tuple[int, ...], dtype: str, repeats: int, seed: int) -> jax.Array:
    """[shape[0] * repeats, *shape[1:]]: random values of `shape`, over and over."""
    key = jax.random.key(seed)
    if dtype == "int8":
        values = jax.random.randint(key, shape, -127, 128, jnp.int8)
    else:
        values = jax.random.normal(key, shape, jnp.float32).astype(dtype)
    return jnp.broadcast_to(values[None], (repeats, *shape)).reshape(-1, *shape[1:])
