"""The division of a decode step's work: tiles on a line, streams that take equal ranges of it, segments of items.

An item is one row's KV head; its tiles are `block_kv` tokens each. All items' tiles lie on one line, heads inside rows, and
the line is cut into equal ranges, one per stream (the stream-K division). What of an item falls into one stream is a segment;
item + stream numbers it, which no other segment shares. The plan is made in XLA, once per step, and knows no layer, page or
head size; from it and an item each kernel works out the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.kernels.pallas.gpu.common import MOVES_REGISTERS, ROW_GROUP, SMEM_BYTES, resources_problem, round_up, transforms

M = 64  # rows of one wgmma
MAX_WARPGROUPS = 8  # of a block, and of a multiprocessor whose threads may have 64 registers each
MAX_STAGES = 8  # of all streams together; more do not hide more, since tiles are consumed faster than loaded


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tunables. The defaults are those of head_dim 128 on an H200, pages in the queries' dtype; `for_heads` has the others."""

    num_sms: int = 132  # of an H100 SXM or H200: one block per SM, all resident at once
    streams: int = 2  # per SM: one's softmax hides behind another's loads
    stages: int = 2  # tiles in flight per stream; 2 streams x 2 stages x 32 KB is what fits beside queries and results
    block_kv: int = 64  # tokens per tile
    out_columns: int = 0  # of a segment's result stored at a time, to save shared memory; 0 is all
    min_tiles: int = 2  # per stream: below that a combine step costs more than the parallelism wins
    combine_unroll: int = 4  # segments of a query head whose loads a warpgroup has in flight together
    producer_registers: int = 40  # per thread; more where it converts quantized tiles
    consumer_registers: int = 216  # 2 x (40 + 216) x 128 threads is the whole register file

    @property
    def num_streams(self) -> int:
        return self.num_sms * self.streams

    @staticmethod
    def for_heads(head_dim: int, head_dim_v: int | None = None, *, is_quantized: bool = False) -> DecodeConfig:
        """The first division of an SM that leaves each stream enough tiles in flight. Quantized tiles are half the size."""
        head_dim_v = head_dim_v or head_dim
        # The accumulator takes head_dim_v / 2 registers, scores, weights and scales about as many again.
        widest = 128 if MOVES_REGISTERS else 64 if is_quantized else 96
        narrow = transforms(head_dim_v, jnp.float32)[0].tiling[1]
        config = DecodeConfig(producer_registers=56, consumer_registers=200) if is_quantized else DecodeConfig()
        if is_quantized and head_dim_v > 128:  # 64 tokens' scores and scales do not fit in registers beside the accumulator
            config = dataclasses.replace(config, block_kv=32)
        for streams, out_columns in ((2, 0), (2, narrow), (1, 0), (1, narrow)):
            if streams > 1 and head_dim_v > widest:
                continue
            for stages in range(MAX_STAGES // streams, 1 + is_quantized, -1):
                found = dataclasses.replace(config, streams=streams, stages=stages, out_columns=out_columns)
                if found.smem_bytes(head_dim, head_dim_v, is_quantized) <= SMEM_BYTES:
                    return found
        return dataclasses.replace(config, streams=1, out_columns=narrow)

    def problem(self, head_dim: int, head_dim_v: int, is_quantized: bool) -> str | None:
        """Why the kernel can not run with this, as a sentence, or None."""
        narrow = transforms(head_dim_v, jnp.float32)[0].tiling[1]
        for name, least in (("num_sms", 1), ("stages", 2), ("min_tiles", 1), ("combine_unroll", 1)):
            if getattr(self, name) < least:
                return f"{name} must be at least {least}, not {getattr(self, name)}"
        if self.streams not in (1, 2):
            return f"streams must be 1 or 2, not {self.streams}"
        if self.block_kv not in (32, 64, 128, 256):
            return f"block_kv must be 32, 64, 128 or 256, not {self.block_kv}"
        if self.out_columns and (self.out_columns % narrow or head_dim_v % self.out_columns):
            return f"out_columns must be 0 or a multiple of {narrow} that divides {head_dim_v}, not {self.out_columns}"
        return resources_problem(self, self.streams, self.streams, self.smem_bytes(head_dim, head_dim_v, is_quantized))

    def smem_bytes(self, head_dim: int, head_dim_v: int, is_quantized: bool) -> int:
        """Of a block, for values of 16 bits."""
        tile = self.block_kv * (head_dim + head_dim_v)
        queries, results = M * head_dim * 2, M * (self.out_columns or head_dim_v) * 4
        tiles = tile * 2 * self.stages
        if is_quantized:
            tiles = tile * 2 + tile * self.stages + (self.stages + 1) * 2 * self.block_kv * 4
        return self.streams * (queries + results + tiles) + 3072  # barriers, and what Mosaic keeps for reductions


class Row(NamedTuple):
    """A line of DecodePlan.rows, traced scalars."""

    kv_len: Any
    start: Any  # tiles of one head of the rows before
    num_queries: Any = None  # None: one


class Stream(NamedTuple):
    """A line of DecodePlan.streams, traced scalars: all that a stream needs to begin."""

    row: Any  # where its first tile lies, and that row's line
    kv_len: Any
    start: Any
    num_tiles: Any  # of the stream; 0 if it has no work
    tiles_per_stream: Any  # the same in all lines
    num_queries: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The division of a step's tiles among streams. Both arrays are int32."""

    rows: jax.Array  # [R, 2 or 3], see Row
    streams: jax.Array  # [num_streams, 5 or 6], see Stream

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.rows, self.streams)

    def row(self, index: Any) -> Row:
        return Row(*(self.rows[index, i] for i in range(self.rows.shape[1])))

    def stream(self, index: Any) -> Stream:
        return Stream(*(self.streams[index, i] for i in range(self.streams.shape[1])))


def plan_decode(
    kv_lens: jax.Array,
    q_lens: jax.Array | None = None,
    *,
    q_len: int,
    num_kv_heads: int,
    sliding_window: int | None = None,
    config: DecodeConfig | None = None,
) -> DecodePlan:
    """kv_lens: int32 [R], the step's included, 0 for padding rows. q_lens: int32 [R], each row's queries, at most `q_len`;
    None: all have as many. Layers with different windows need different plans.

    Each array is one sum over all rows, so that XLA makes each in one kernel: cumsum, searchsorted and gathers are several.
    """
    config = config or DecodeConfig()
    kv_lens = kv_lens.astype(jnp.int32)
    if q_lens is None and q_len > 1:
        q_lens = jnp.full_like(kv_lens, q_len)
    first, end = _tile_range(kv_lens, q_lens, sliding_window, config.block_kv)
    counts = end - first
    index = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    is_before, is_same = index < index[:, None], index == index[:, None]
    rows = _sums(*Row(
        jnp.where(is_same, kv_lens, 0), jnp.where(is_before, counts, 0),
        None if q_lens is None else jnp.where(is_same, q_lens, 0),
    ))  # fmt: skip

    starts, total = rows[:, 1], (rows[-1, 1] + counts[-1]) * num_kv_heads
    per_stream = jnp.maximum(lax.div(total + (config.num_streams - 1), jnp.int32(config.num_streams)), config.min_tiles)
    begins = jnp.arange(config.num_streams, dtype=jnp.int32)[:, None] * per_stream
    is_over = (starts + counts) * num_kv_heads <= begins
    is_here = ~is_over & (starts * num_kv_heads <= begins) & (counts > 0)
    num_tiles = jnp.where(index == 0, jnp.clip(total - begins, 0, per_stream), 0)
    fields = Stream(
        jnp.where(is_over, 1, 0), jnp.where(is_here, kv_lens, 0), jnp.where(is_here, starts, 0), num_tiles,
        jnp.where(index == 0, per_stream, 0) + jnp.zeros_like(begins),
        None if q_lens is None else jnp.where(is_here, q_lens, 0),
    )  # fmt: skip
    return DecodePlan(rows, _sums(*fields))


def _sums(*fields: jax.Array | None) -> jax.Array:
    """Sums along the last axis of the arrays [N, R], side by side: [N, arrays]."""
    arrays = [field for field in fields if field is not None]
    return jnp.sum(jnp.stack(arrays, axis=1), axis=2, dtype=jnp.int32)


def _first_seen(kv_len: Any, num_queries: Any | None, sliding_window: int | None) -> Any:
    """The oldest token that any query of the row sees."""
    if sliding_window is None:
        return jnp.zeros_like(kv_len)
    before_last = 0 if num_queries is None else num_queries - 1
    return jnp.maximum(kv_len - (before_last + sliding_window), 0)


def _tile_range(kv_len: Any, num_queries: Any | None, sliding_window: int | None, block_kv: int) -> tuple[Any, Any]:
    """First tile that any query of the row sees, and one past the last."""
    size = jnp.full_like(kv_len, block_kv)
    return lax.div(_first_seen(kv_len, num_queries, sliding_window), size), lax.div(kv_len + (block_kv - 1), size)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static numbers of one call of the kernels."""

    rows: int
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    sliding_window: int | None
    config: DecodeConfig

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def live_rows(self) -> int:
        """Rows of an item's products: its queries, each with its heads, and what fills the last group of rows."""
        return round_up(self.q_len * self.group, ROW_GROUP)

    @property
    def is_gathered(self) -> bool:
        """Whether `q` is copied first, so that the rows of each item are side by side and whole groups."""
        lines = self.rows * self.num_heads
        fills_groups = self.group % ROW_GROUP == 0 or (ROW_GROUP % self.group == 0 and lines % ROW_GROUP == 0)
        return self.q_len > 1 or not fills_groups

    def query_line(self, row: Any, kv_head: Any) -> Any:
        """The line of an item's first query in q as the kernel takes it, [lines, Dk]."""
        if self.is_gathered:
            return (row * self.num_kv_heads + kv_head) * self.live_rows
        return row * self.num_heads + kv_head * self.group

    @property
    def num_segments(self) -> int:
        return self.rows * self.num_kv_heads + self.config.num_streams

    @property
    def combine_warpgroups(self) -> int:
        """That share the segments of a query head. How many segments those are, only the plan knows: a row alone among empty
        ones may have them all. So as many as the GPU runs at once anyway: few rows have many, and more than one wave of
        thread blocks would wait for the empty ones.
        """
        blocks = self.rows * self.q_len * self.num_heads
        return min(MAX_WARPGROUPS, max(1, self.config.num_sms * MAX_WARPGROUPS // blocks))

    @property
    def pages_per_tile(self) -> int:
        return max(1, self.config.block_kv // self.page_size)

    def first_seen(self, row: Row | Stream | Segment) -> Any:
        return _first_seen(row.kv_len, row.num_queries, self.sliding_window)

    def tiles(self, row: Row | Stream) -> tuple[Any, Any]:
        return _tile_range(row.kv_len, row.num_queries, self.sliding_window, self.config.block_kv)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stream's share of an item; traced scalars."""

    number: Any
    row: Any
    head: Any
    kv_len: Any
    begin: Any  # tiles of the row
    end: Any
    num_queries: Any | None


def for_each_segment(shape: Shape, plan: DecodePlan, index: Any, visit: Callable[[Segment, Any], None]) -> Any:
    """Calls visit(segment, tiles of the stream before it) for each segment of a stream; returns the stream's tiles."""
    stream = plan.stream(index)
    begin = index * stream.tiles_per_stream
    one_head = _num_tiles(shape, stream)
    head = lax.div(begin - stream.start * shape.num_kv_heads, jnp.maximum(one_head, 1))

    def step(state: _Place) -> _Place:
        done, row, head, about = state
        first, end = shape.tiles(about)
        origin = about.start * shape.num_kv_heads + head * (end - first)  # where the item's first tile lies
        tile = first + begin + done - origin
        count = jnp.minimum(end - tile, stream.num_tiles - done)
        item = row * shape.num_kv_heads + head
        segment = Segment(item + index, row, head, about.kv_len, tile, tile + count, about.num_queries)
        pl.when(count > 0)(lambda: visit(segment, done))
        is_last_head = (head + 1 == shape.num_kv_heads) | (end <= first)  # an empty row has none to visit
        row = row + jnp.where(is_last_head, 1, 0)
        about = plan.row(jnp.minimum(row, shape.rows - 1))
        return _Place(done + jnp.maximum(count, 0), row, jnp.where(is_last_head, 0, head + 1), about)

    start = _Place(jnp.int32(0), stream.row, head, Row(stream.kv_len, stream.start, stream.num_queries))
    return lax.while_loop(lambda state: state.done < stream.num_tiles, step, start).done


class _Place(NamedTuple):
    """How far a stream has come, traced scalars."""

    done: Any  # tiles
    row: Any
    head: Any
    about: Row


def _num_tiles(shape: Shape, row: Row | Stream) -> Any:
    first, end = shape.tiles(row)
    return end - first


def segments_of(shape: Shape, plan: DecodePlan, row: Any, kv_head: Any, query: Any) -> tuple[Any, Any]:
    """Number of an item's first segment, and one past its last; equal where the row has no tokens or not so many queries."""
    about, per_stream = plan.row(row), plan.stream(0).tiles_per_stream
    count = _num_tiles(shape, about)
    line = about.start * shape.num_kv_heads + kv_head * count
    item = row * shape.num_kv_heads + kv_head
    begin = item + lax.div(line, per_stream)
    is_live = count > 0
    if about.num_queries is not None:
        is_live &= query < about.num_queries
    return begin, jnp.where(is_live, item + lax.div(line + count - 1, per_stream) + 1, begin)
