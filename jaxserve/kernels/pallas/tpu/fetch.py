"""What the TPU attention kernel works on and how it comes to VMEM: the refs, the items, and the copies that run ahead.

The KV blocks of all items are one sequence, in the order in which the kernel works on them. A block's copies start
num_buffers - 1 blocks before its turn, whichever item it belongs to, and an item's row of the page table comes to SMEM several
items earlier: where contexts are short, a block is copied faster than a copy's latency, and only several in flight hide it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.tuning import PassConfig

_TABLE_BYTES = 128 << 10  # of SMEM, for rows of the page table
_MAX_TABLE_ROWS = 8
_STARTS_SIDE_BY_SIDE = 4  # page copies that are started without a branch between them


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """What is known when the kernel is traced."""

    layout: RowLayout
    num_kv_heads: int
    page_size: int
    pages_per_row: int  # of the page table; its rows come to SMEM one at a time, where all of them might not fit
    config: PassConfig
    has_window: bool
    soft_cap: float | None
    has_sinks: bool
    has_scales: bool
    has_positions: bool  # of the plan: a row's keys may end before its queries do
    has_log_sums: bool

    @property
    def block_pages(self) -> int:
        return max(1, self.config.kv_block_tokens // self.page_size)

    @property
    def kv_block_tokens(self) -> int:
        return self.block_pages * self.page_size

    @property
    def chunk_tokens(self) -> int:
        return min(self.config.kv_chunk_tokens, self.kv_block_tokens)

    @property
    def head_unroll(self) -> int:
        unroll = min(self.config.head_unroll, self.num_kv_heads)
        assert self.num_kv_heads % unroll == 0, f"{self.num_kv_heads} heads, {unroll} at a time"
        return unroll

    @property
    def table_rows(self) -> int:
        """Rows of the page table that are in SMEM at a time, a power of two."""
        count = _MAX_TABLE_ROWS
        while count > 2 and count * self.pages_per_row * 4 > _TABLE_BYTES:
            count //= 2
        return count


class Refs(NamedTuple):
    """In the order in which pallas_call hands them over; those that a shape does not have are None."""

    # Scalars: the arrays of PassPlan.
    block_items: Any
    item_block: Any
    item_row: Any
    q_start: Any
    q_len: Any
    kv_len: Any
    position: Any
    page_offset: Any  # [1]
    window: Any  # [1]
    # Inputs.
    q: Any  # VMEM [Hkv, tiles of the block, tile_rows, key_lanes], scaled
    token_of_row: Any  # VMEM int32 [tile_rows, 128]
    sinks: Any  # VMEM float32 [Hkv, tile_rows, 128], in base 2
    page_table: Any  # HBM int32 [R, 1, pages_per_row]
    pool: Any  # HBM [P, Hkv, page_size, width]
    scales: Any  # HBM float32 [P, 2 * Hkv, page_size]
    # Outputs.
    out: Any  # VMEM [Hkv, tiles of the block, tile_rows, value_lanes]
    log_sums: Any  # VMEM float32 [Hkv, tiles of the block, tile_rows / 128, 128]
    # Scratch.
    kv: Any  # VMEM [buffers, Hkv, kv_block_tokens, width]
    kv_scales: Any  # VMEM [buffers, block_pages, 2 * Hkv, page_size]
    weighted: Any  # VMEM float32, shape of out
    maximum: Any  # VMEM float32 [Hkv, tiles of the block, tile_rows, 128]
    total: Any  # the same
    progress: Any  # SMEM int32 [4]: the places below
    table_rows: Any  # SMEM int32 [table_rows, 1, pages_per_row] of the items whose copies start next; i % table_rows
    written_pages: Any  # SMEM int32 [buffers] so many of a buffer's pages have been copied or cleared in this call
    copied: Any  # DMA semaphores [buffers] of pages
    table_copied: Any  # DMA semaphores [table_rows]


# Places of Refs.progress: the first KV block whose copies have not started (its item, its number there, its buffer), and the
# buffer of the first one that has not been worked on.
_NEXT_ITEM, _NEXT_BLOCK, _NEXT_BUFFER, _USED_BUFFER = range(4)
NUM_PROGRESS = 4


class Item(NamedTuple):
    """Scalars of one item."""

    index: Any
    row: Any
    first_token: Any  # the tokens of this pass that belong to the item: first_token:end_token
    end_token: Any
    position_of_token: Any  # what to add to a token to get its position
    first_page: Any  # pages that hold what the item's queries see: first_page:end_page, by position in the row
    end_page: Any
    kv_end: Any  # positions at or past this are seen by none of its queries


def read_item(shape: KernelShape, refs: Refs, index: Any) -> Item:
    row, block = refs.item_row[index], refs.item_block[index]
    B = shape.config.block_tokens
    start, length, kv_len = refs.q_start[row], refs.q_len[row], refs.kv_len[row]
    first_token = jnp.maximum(start, block * B)
    end_token = jnp.minimum(start + length, (block + 1) * B)
    if shape.has_positions:
        position = refs.position[row] - start
        kv_end = jnp.minimum(end_token + position, kv_len)
    else:
        position = kv_len - length - start
        kv_end = end_token + position
    first_page = jnp.int32(0)
    if shape.has_window:
        first_page = jnp.maximum(first_token + position - refs.window[0] + 1, 0) // shape.page_size
    return Item(index, row, first_token, end_token, position, first_page, pl.cdiv(kv_end, shape.page_size), kv_end)


def num_kv_blocks(shape: KernelShape, item: Item) -> Any:
    return pl.cdiv(item.end_page - item.first_page, shape.block_pages)


def _num_pages(shape: KernelShape, item: Item, kv_block: Any) -> Any:
    """Of a KV block; none are past the item's end."""
    return jnp.minimum(shape.block_pages, item.end_page - item.first_page - kv_block * shape.block_pages)


def _buffer_parts(shape: KernelShape, refs: Refs, buffer: Any, first_page: Any, num_pages: int) -> list[Any]:
    """Where in a buffer its pages first_page:first_page + num_pages are, and their scales."""
    first_slot = pl.multiple_of(first_page * shape.page_size, shape.page_size)
    parts = [refs.kv.at[buffer, :, pl.ds(first_slot, num_pages * shape.page_size), :]]
    if shape.has_scales:
        parts.append(refs.kv_scales.at[buffer, pl.ds(first_page, num_pages)])
    return parts


def _start_pages(shape: KernelShape, refs: Refs, item: Item, kv_block: Any, buffer: Any) -> None:
    first, table_row = item.first_page + kv_block * shape.block_pages, item.index % shape.table_rows

    def start(i: Any) -> None:
        page_id = refs.page_offset[0] + refs.table_rows[table_row, 0, first + i]
        sources = [refs.pool.at[page_id]] + ([refs.scales.at[pl.ds(page_id, 1)]] if shape.has_scales else [])
        for source, target in zip(sources, _buffer_parts(shape, refs, buffer, i, 1), strict=True):
            pltpu.make_async_copy(source, target, refs.copied.at[buffer]).start()

    for_each(_num_pages(shape, item, kv_block), min(_STARTS_SIDE_BY_SIDE, shape.block_pages), start)


def for_each(count: Any, side_by_side: int, do: Callable[[Any], None]) -> None:
    """Calls `do` with 0:count, with that many calls between two branches; the last few one by one."""
    num_groups = count // side_by_side if isinstance(count, int) else jax.lax.div(count, jnp.int32(side_by_side))

    def group(g: Any, _: None) -> None:
        for i in range(side_by_side):
            do(g * side_by_side + i)

    jax.lax.fori_loop(0, num_groups, group, None)
    if not isinstance(count, int) or count % side_by_side:
        jax.lax.fori_loop(num_groups * side_by_side, count, lambda i, _: do(i), None)


def wait_for_pages(shape: KernelShape, refs: Refs, item: Item, kv_block: Any, buffer: Any) -> None:
    """A wait asks for bytes, whichever copies brought them: a full block is one wait, others one per bit of their pages."""
    count = _num_pages(shape, item, kv_block)
    for bit in range(shape.block_pages.bit_length()):

        @pl.when(count & (1 << bit) != 0)
        def _(num_pages: int = 1 << bit) -> None:
            for part in _buffer_parts(shape, refs, buffer, 0, num_pages):
                pltpu.make_async_copy(part, part, refs.copied.at[buffer]).wait()


def _table_copy(shape: KernelShape, refs: Refs, index: Any) -> Any:
    """Of an item's row of the page table."""
    slot = index % shape.table_rows
    return pltpu.make_async_copy(refs.page_table.at[refs.item_row[index]], refs.table_rows.at[slot], refs.table_copied.at[slot])


def start_first(shape: KernelShape, refs: Refs, num_items: Any) -> None:
    """Begins the sequence of KV blocks: page tables of the first items, and as many blocks as may be on their way."""
    for place in range(refs.progress.shape[0]):
        refs.progress[place] = 0
    for buffer in range(refs.written_pages.shape[0]):
        refs.written_pages[buffer] = 0
    num_rows = jnp.minimum(shape.table_rows - 1, num_items)
    jax.lax.fori_loop(0, num_rows, lambda index, _: _table_copy(shape, refs, index).start(), None)
    jax.lax.fori_loop(0, shape.config.num_buffers - 1, lambda _, __: start_next(shape, refs, num_items), None)


def start_next(shape: KernelShape, refs: Refs, num_items: Any) -> None:
    """Starts the copies of the first KV block that is not on its way yet, if there is one."""
    index, kv_block, buffer = (refs.progress[place] for place in (_NEXT_ITEM, _NEXT_BLOCK, _NEXT_BUFFER))

    @pl.when(index < num_items)
    def _() -> None:
        @pl.when(kv_block == 0)
        def _() -> None:
            _table_copy(shape, refs, index).wait()
            later = index + shape.table_rows - 1  # into the place of the item before this one
            pl.when(later < num_items)(lambda: _table_copy(shape, refs, later).start())

        item = read_item(shape, refs, index)
        _start_pages(shape, refs, item, kv_block, buffer)
        is_last = kv_block + 1 == num_kv_blocks(shape, item)
        refs.progress[_NEXT_ITEM] = jnp.where(is_last, index + 1, index)
        refs.progress[_NEXT_BLOCK] = jnp.where(is_last, 0, kv_block + 1)
        refs.progress[_NEXT_BUFFER] = _buffer_after(shape, buffer)


def take_buffer(shape: KernelShape, refs: Refs) -> Any:
    """That of the next KV block to work on."""
    buffer = refs.progress[_USED_BUFFER]
    refs.progress[_USED_BUFFER] = _buffer_after(shape, buffer)
    return buffer


def _buffer_after(shape: KernelShape, buffer: Any) -> Any:
    return jnp.where(buffer + 1 == shape.config.num_buffers, 0, buffer + 1)
