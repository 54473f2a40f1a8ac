"""The reference backend's loops: blocks of query tiles, and for each the chunks of keys that it sees.

    for block in blocks of live tiles:             trip count: this step's live tiles
        for chunk in the block's visible keys:     trip count: the longest context of the block
            gather keys and values, then scores, running max, sum and weighted values

So memory holds one chunk, and time follows the contexts as they are, not the page table's width. The softmax is the online one
(Milakov & Gimelshein, arXiv 1805.02867). Nothing is shared between tiles, so a row's result does not depend on what else is in
the batch, except for the rounding of matrix products of another batch size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.typing

from jaxserve.kernels import reference_pages
from jaxserve.kernels.filled import filled
from jaxserve.kernels.query_tiles import QueryTiles
from jaxserve.kernels.reference_pages import ReferenceKV

# A score that is not there. Finite, so that the difference of two of them is 0 and not NaN.
_MASKED = -0.5 * float(jnp.finfo(jnp.float32).max)

# The specification does not round to what an accelerator's matrix unit likes best.
_PRECISION = jax.lax.Precision.HIGHEST
# Scores of at least this many queries per key are computed queries first.
_MANY_QUERIES = 16


@dataclasses.dataclass(frozen=True)
class ReferenceTuning:
    """Measured with benchmarks/attention_reference.py on 2 CPU cores; times are flat around these values."""

    # Keys per step of the inner loop. More means fewer, larger products, and more waste for contexts that end within it.
    kv_chunk_tokens: int = 128
    # Queries per tile of a prompt. More means fewer gathers of the same keys, and more waste for short prompts.
    q_tile_tokens: int = 32
    # Keys, values, scores and results that a block of tiles holds at a time, as float32. More means fewer steps, and more waste
    # in blocks with idle tiles or unlike contexts; they should stay in the cores' caches.
    block_bytes: int = 1280 << 10


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """What happens to q·k before the softmax."""

    scale: float
    sliding_window: Any  # int or int32 scalar: keys a query sees, its own included; None: all
    soft_cap: float | None
    sinks: jax.Array | None  # float32 [Hkv, G]
    is_causal: bool = True  # False: a query sees those behind it, too; within a window as many as before it


@dataclasses.dataclass(frozen=True)
class PagedKV:
    """One layer's keys and values."""

    pool: ReferenceKV  # of all layers
    page_table: jax.Array  # [R, max_pages]
    page_offset: jax.typing.ArrayLike  # the layer's first page in the pool
    chunk_pages: int  # pages read at a time

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_pages * self.pool.page_size

    def read(self, row: jax.Array, chunk: jax.Array, kv_begin: jax.Array, kv_end: jax.Array) -> _Chunk:
        """Chunk `chunk` [B] of each row `row` [B]. What lies before `kv_begin` [B], or at or past `kv_end` [B], is not
        followed, and zero in the values: a stranger's leftovers there may be NaN, and 0 * NaN is NaN."""
        page_size = self.pool.page_size
        index = chunk[:, None] * self.chunk_pages + jnp.arange(self.chunk_pages, dtype=jnp.int32)
        entries = self.page_table.at[row[:, None], index].get(mode="clip", wrap_negative_indices=False)
        has_live = (index * page_size < kv_end[:, None]) & ((index + 1) * page_size > kv_begin[:, None])
        pages = jnp.where(has_live, entries, 0) + self.page_offset
        positions = chunk[:, None] * self.chunk_tokens + jnp.arange(self.chunk_tokens, dtype=jnp.int32)
        is_live = (positions >= kv_begin[:, None]) & (positions < kv_end[:, None])
        keys = reference_pages.read(self.pool, pages, reference_pages.KEYS)
        values = reference_pages.read(self.pool, pages, reference_pages.VALUES) if self.pool.has_values else keys
        return _Chunk(keys, jnp.where(is_live[:, None, :, None], values, 0), positions, is_live)


class _Chunk(NamedTuple):
    keys: jax.Array  # float32 [B, Hkv, C, D]
    values: jax.Array  # float32 [B, Hkv, C, D]
    positions: jax.Array  # int32 [B, C]
    is_live: jax.Array  # bool [B, C]


class _Softmax(NamedTuple):
    """The carry of the inner loop; M = tile_tokens * G rows of scores per KV head."""

    max_score: jax.Array  # [B, Hkv, M]
    total: jax.Array  # [B, Hkv, M] sum of exp(score - max_score)
    weighted: jax.Array  # [B, Hkv, M, D] sum of exp(score - max_score) * value


class Attended(NamedTuple):
    """Of all queries of a step. float32 whatever they are: XLA on CPU would convert all of a bfloat16 buffer for each scatter
    into it. Where a query sees no key, log_sums is about _MASKED, and `out` some number."""

    out: jax.Array  # float32 [T, Hkv, G, D]
    log_sums: jax.Array | None  # float32 [T, Hkv, G] of exp(score)

    @staticmethod
    def nothing(q: jax.Array, *, with_log_sums: bool) -> Attended:
        log_sums = filled(q.shape[:3], _MASKED, after=q) if with_log_sums else None
        return Attended(filled(q.shape, 0, after=q), log_sums)


def attend_tiles(
    out: Attended, q: jax.Array, kv: PagedKV, tiles: QueryTiles, options: ScoreOptions, block_bytes: int
) -> Attended:
    """Writes the results of the tiles' queries q [T, Hkv, G, D] to `out`."""
    block_len = _block_len(q, kv, tiles, block_bytes)
    num_live = jnp.sum(tiles.num_tokens > 0, dtype=jnp.int32)

    def attend_next(index: jax.Array, out: Attended) -> Attended:
        # A last block that would not be full starts earlier (dynamic_slice clamps): it repeats some tiles, with equal results.
        return _attend_block(out, q, kv, tiles.block(index * block_len, block_len), options)

    return jax.lax.fori_loop(0, -(-num_live // block_len), attend_next, out)


def _block_len(q: jax.Array, kv: PagedKV, tiles: QueryTiles, block_bytes: int) -> int:
    """Tiles per block: a power of two, as their number mostly is, that keeps a step of the inner loop within `block_bytes`."""
    _, Hkv, G, D = q.shape
    M, C = tiles.tile_tokens * G, kv.chunk_tokens
    tile_bytes = jnp.dtype(jnp.float32).itemsize * Hkv * (2 * C * D + M * C + M * D)
    fitting = max(1, min(len(tiles), block_bytes // tile_bytes))
    return 1 << (fitting.bit_length() - 1)


def _attend_block(out: Attended, q: jax.Array, kv: PagedKV, block: QueryTiles, options: ScoreOptions) -> Attended:
    T, Hkv, G, D = q.shape
    B, tile_tokens = len(block), block.tile_tokens
    M = tile_tokens * G
    in_tile = jnp.arange(tile_tokens, dtype=jnp.int32)
    token = jnp.where(in_tile < block.num_tokens[:, None], block.first_token[:, None] + in_tile, T)
    heads = jnp.arange(Hkv, dtype=jnp.int32)
    # One gather brings the heads before the tokens.
    queries = q.at[token[:, None, :], heads[None, :, None]].get(mode="clip", wrap_negative_indices=False).reshape(B, Hkv, M, D)
    queries = queries.astype(jnp.float32)
    query_pos = block.first_pos[:, None] + jnp.arange(M, dtype=jnp.int32) // G

    kv_begin = jnp.zeros(B, jnp.int32)  # of each tile: what its first query sees first
    if options.sliding_window is not None:
        kv_begin = jnp.maximum(block.first_pos - options.sliding_window + 1, 0)
    kv_end = _kv_end(block, options)
    first_chunk = kv_begin // kv.chunk_tokens

    def add_chunk(index: jax.Array, carry: _Softmax) -> _Softmax:
        chunk = kv.read(block.row, first_chunk + index, kv_begin, kv_end)
        scores = _scores(queries, query_pos, chunk, options)
        return _add(carry, scores, chunk.values)

    num_chunks = jnp.max(-(-kv_end // kv.chunk_tokens) - first_chunk)
    carry = _Softmax(
        jnp.full((B, Hkv, M), _MASKED, jnp.float32),
        jnp.zeros((B, Hkv, M), jnp.float32),
        jnp.zeros((B, Hkv, M, D), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, num_chunks, add_chunk, carry)

    def put(target: jax.Array, result: jax.Array) -> jax.Array:
        result = result.reshape(B, Hkv, tile_tokens, *target.shape[2:])
        return target.at[token[:, None, :], heads[None, :, None]].set(result, mode="drop", wrap_negative_indices=False)

    log_sums = None if out.log_sums is None else put(out.log_sums, carry.max_score + jnp.log(jnp.maximum(carry.total, 1e-30)))
    return Attended(put(out.out, _finish(carry, options.sinks)), log_sums)


def _kv_end(block: QueryTiles, options: ScoreOptions) -> jax.Array:
    """int32 [B]: one past what each tile's last query sees last."""
    if options.is_causal or options.sliding_window is None:
        return block.kv_end
    last_pos = block.first_pos + block.num_tokens - 1
    return last_pos + jnp.minimum(block.kv_end - last_pos, options.sliding_window)  # the window may be the largest int32


def _scores(queries: jax.Array, query_pos: jax.Array, chunk: _Chunk, options: ScoreOptions) -> jax.Array:
    """float32 [B, Hkv, M, C], _MASKED where the query must not see the key."""
    scores = _products(queries, chunk.keys, options.scale)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    key_pos = chunk.positions[:, None, :]
    visible = chunk.is_live[:, None, :]
    if options.is_causal:
        visible &= key_pos <= query_pos[:, :, None]
    if options.sliding_window is not None:
        visible &= key_pos > query_pos[:, :, None] - options.sliding_window
        if not options.is_causal:
            visible &= key_pos - options.sliding_window < query_pos[:, :, None]
    return jnp.where(visible[:, None], scores, _MASKED)


def _products(queries: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """scale * q·k, float32 [B, Hkv, M, C]."""
    if queries.shape[2] >= _MANY_QUERIES:
        return jnp.einsum("bhmd,bhcd->bhmc", queries, keys, precision=_PRECISION) * scale
    # Keys on the left: XLA's CPU product is up to three times as fast for a few queries against many keys. The scale comes in
    # between, or XLA would undo it.
    return jnp.swapaxes(jnp.einsum("bhcd,bhmd->bhcm", keys, queries, precision=_PRECISION) * scale, 2, 3)


def _add(carry: _Softmax, scores: jax.Array, values: jax.Array) -> _Softmax:
    max_score = jnp.maximum(carry.max_score, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - max_score[..., None])
    kept = jnp.exp(carry.max_score - max_score)
    weighted = jnp.einsum("bhmc,bhcd->bhmd", weights, values, precision=_PRECISION)
    return _Softmax(max_score, carry.total * kept + jnp.sum(weights, axis=-1), carry.weighted * kept[..., None] + weighted)


def _finish(carry: _Softmax, sinks: jax.Array | None) -> jax.Array:
    """[B, Hkv, M, D]: the weighted mean of the values. A sink adds to the sum of weights only."""
    max_score, total, weighted = carry
    if sinks is not None:
        tile_tokens = total.shape[-1] // sinks.shape[-1]
        sink = jnp.tile(sinks, (1, tile_tokens))  # [Hkv, M]: M runs over the tile's tokens, then over G
        highest = jnp.maximum(max_score, sink)
        kept = jnp.exp(max_score - highest)
        total, weighted = total * kept + jnp.exp(sink - highest), weighted * kept[..., None]
    # The total is at least 1 for a live query, which sees itself; idle queries must only not trap.
    return weighted / jnp.maximum(total, 1e-30)[..., None]
