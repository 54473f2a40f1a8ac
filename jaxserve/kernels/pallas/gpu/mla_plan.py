"""MLA decode's plan: which worker computes which part of which row. What all its kernels share of static shape."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.kernels.pallas.gpu.softmax import Scoring

LATENT = 512
ROPE = 64  # as many columns as a tile has tokens: the weights fit into their place
ROW = LATENT + ROPE
TILE = 64  # tokens
M = 64  # query rows of one wgmma
CONSUMERS = 2  # warpgroups, and tiles in shared memory: each has its own
HALF = LATENT // CONSUMERS
QUERY_PIECES = 3
PAGE_SIZES = (8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """What may be tuned."""

    num_blocks: int = 132  # streaming multiprocessors of an H100 or H200; shared memory allows one block on each
    min_tiles: int = 4  # per worker: below 256 tokens a split row's partial results cost about as much as its KV
    combine_unroll: int = 4  # parts of a row whose loads are under way together
    max_combine_threads: int = 8  # warpgroups that share a row's parts: 1024 threads, the most that a block can have

    def workers(self, blocks_per_row: int) -> int:
        return max(1, self.num_blocks // blocks_per_row)

    def combine_threads(self, num_rows: int, num_workers: int) -> int:
        """A power of two not above the parts that a row has on average: few rows are cut into many parts."""
        parts = min(max(num_workers // num_rows, 1), self.max_combine_threads)
        return 1 << (parts.bit_length() - 1)


def block_rows(rows: int) -> int:
    """Query rows of one block: the largest multiple of 8 up to 64 that divides `rows`."""
    return next(m for m in range(M, 0, -8) if rows % m == 0)


class Row(NamedTuple):
    """One line of MlaPlan.rows, traced scalars."""

    row: Any  # of the batch
    table_row: Any  # of the page table
    kv_len: Any
    first_tile: Any  # the row's first that any query sees
    start: Any  # its place in the line of all rows' tiles
    end: Any
    first_slot: Any  # where its first partial result is
    first_worker: Any  # that has a part of it; the others follow
    num_parts: Any

    @staticmethod
    def read(plan_rows: Any, index: Any) -> Row:
        return Row(*(plan_rows[index, i] for i in range(len(Row._fields))))


class Worker(NamedTuple):
    """One line of MlaPlan.workers, traced scalars."""

    start: Any  # its stretch of the line
    end: Any
    first: Any  # its lines of MlaPlan.rows
    last: Any  # one past them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaPlan:
    """Who does what in one step; all layers share it."""

    rows: jax.Array  # int32 [R, 9], see Row; rows without a token come last
    workers: jax.Array  # int32 [W, 4], see Worker
    combined: jax.Array  # int32 [C] lines of rows that the second kernel looks at: each that has several parts, and others
    sliding_window: int | None = dataclasses.field(metadata={"static": True})


def plan_mla_decode(
    kv_lens: jax.Array,
    table_rows: jax.Array | None = None,
    *,
    q_len: int,
    num_heads: int,
    sliding_window: int | None = None,
    config: MlaConfig,
) -> MlaPlan:
    """Cuts the KV tiles of rows of kv_lens int32 [R] into equal stretches. `sliding_window` must be the op's.

    `table_rows` int32 [R] names each row's line of the page table, which several may share. Where it is given rows without a
    token get no zeros, but anything: there may be thousands of rows, of which few have several parts.
    """
    rows = q_len * num_heads
    num_workers = config.workers(rows // block_rows(rows))
    kv_lens = kv_lens.astype(jnp.int32)
    order = jnp.argsort(kv_lens == 0).astype(jnp.int32)
    kv_lens = kv_lens[order]
    first_tile = jnp.zeros_like(kv_lens)
    if sliding_window is not None:
        first_tile = jnp.maximum(kv_lens - q_len + 1 - sliding_window, 0) // TILE
    ends = jnp.cumsum((kv_lens + TILE - 1) // TILE - first_tile, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    quota = jnp.maximum((ends[-1] + num_workers - 1) // num_workers, config.min_tiles)
    worker_ends = jnp.minimum(jnp.arange(num_workers + 1, dtype=jnp.int32) * quota, ends[-1])
    begin, end = worker_ends[:-1], worker_ends[1:]

    def ended_at(tile: jax.Array) -> jax.Array:
        return jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)

    first = ended_at(begin)
    workers = jnp.stack([begin, end, first, jnp.where(end > begin, ended_at(end - 1) + 1, first)], axis=1)
    first_worker = starts // quota
    num_parts = jnp.where(ends > starts, (ends - 1) // quota - first_worker + 1, 0)
    first_slot = 2 * first_worker + (starts % quota > 0)
    fields = [
        order, order if table_rows is None else table_rows[order], kv_lens, first_tile, starts, ends, first_slot, first_worker,
        num_parts,
    ]  # fmt: skip
    combined = jnp.arange(len(order), dtype=jnp.int32)
    if table_rows is not None:  # a worker shares at most one row with the next
        combined = jnp.argsort(num_parts < 2)[:num_workers].astype(jnp.int32)
    return MlaPlan(jnp.stack(fields, axis=1), workers, combined, sliding_window)


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that is static in one kernel."""

    num_rows: int
    num_combined: int
    q_len: int
    num_heads: int
    page_size: int
    num_workers: int
    dtype: Any
    scoring: Scoring
    sliding_window: int | None
    has_log_sums: bool
    is_interpreted: bool
    config: MlaConfig

    @property
    def m(self) -> int:
        """Query rows of a block."""
        return block_rows(self.q_len * self.num_heads)

    @property
    def blocks(self) -> int:
        return self.q_len * self.num_heads // self.m

    @property
    def copy_rows(self) -> int:
        """Tokens of one TMA copy."""
        return min(self.page_size, TILE)

    @property
    def copies(self) -> int:
        return TILE // self.copy_rows
