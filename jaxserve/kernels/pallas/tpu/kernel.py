"""The body of the TPU attention kernel: decode and extend, grouped heads and MLA are one kernel over different tiles.

    for block of query tokens (the grid; queries and results are pipelined by Pallas):
        for item, a row with tokens in the block:                trip count: this step's
            for KV block of the item's pages:                    trip count: from the window's begin to the last query's key
                start the copies of one that comes later, maybe another item's; wait for this one's (fetch)
                for chunk of it, for query tile that sees it:    exact bounds, causal and window
                    for KV head: scores, online softmax, weighted values

Softmax is the online one (Milakov & Gimelshein, arXiv 1805.02867), in float32 and to base 2: scale * log2(e) is folded into q,
which saves a vector operation per score; by peak rates v6e and TPU7x spend more time on vector operations than on products.
The running maximum is kept in all 128 lanes, so that using it needs no broadcast; the running sum is 128 sums, one per lane,
that are added up at the end.

No view of a ref is reshaped or bitcast, so that Pallas' TPU interpreter can run the kernel.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxserve.kernels.pallas.tpu.fetch import (
    Item,
    KernelShape,
    Refs,
    for_each,
    num_kv_blocks,
    read_item,
    start_first,
    start_next,
    take_buffer,
    wait_for_pages,
)
from jaxserve.kernels.pallas.tpu.layout import LANES
from jaxserve.kernels.pallas.tpu.tuning import PRODUCT_ROWS

LOG2_E = 1.4426950408889634
_LN_2 = 1 / LOG2_E
# The running maximum before the first score. A masked score is -inf, so its weight is 0 even where all scores are masked.
NO_MAXIMUM = -1e30
# Stands for "no sliding window" where only some layers have one; a position plus this is still an int32.
NO_WINDOW = 1 << 30


def attention_kernel(shape: KernelShape, refs: Refs) -> None:
    block = pl.program_id(0)
    num_items = refs.block_items[refs.block_items.shape[0] - 1]

    pl.when(block == 0)(lambda: start_first(shape, refs, num_items))

    refs.weighted[...] = jnp.zeros(refs.weighted.shape, jnp.float32)
    if shape.has_sinks:  # a sink is a score seen already, without a value
        refs.maximum[...] = jnp.broadcast_to(refs.sinks[...][:, None], refs.maximum.shape)
        lane = jax.lax.broadcasted_iota(jnp.int32, refs.total.shape, refs.total.ndim - 1)
        refs.total[...] = jnp.where(lane == 0, 1.0, 0.0)
    else:
        refs.maximum[...] = jnp.full(refs.maximum.shape, NO_MAXIMUM)
        refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)

    jax.lax.fori_loop(
        refs.block_items[block],
        refs.block_items[block + 1],
        lambda index, _: _attend_item(shape, refs, block, index, num_items),
        None,
    )
    _write_out(shape, refs)


def _write_out(shape: KernelShape, refs: Refs) -> None:
    def tile(t: Any, _: None) -> None:
        for head in range(shape.num_kv_heads):
            total = jnp.sum(refs.total[head, t], axis=1, keepdims=True)
            result = refs.weighted[head, t] / jnp.maximum(total, 1e-30)  # 0 for padding, whose weighted sum is 0 too
            refs.out[head, t] = result.astype(refs.out.dtype)
            if shape.has_log_sums:
                _write_log_sums(refs, head, t, total)

    jax.lax.fori_loop(0, refs.out.shape[1], tile, None)


def _write_log_sums(refs: Refs, head: int, tile: Any, total: jax.Array) -> None:
    """One lane for each row of the tile: as `maximum` has them, they would be more bytes than the results are."""
    log_sums = refs.maximum[head, tile] * _LN_2 + jnp.log(jnp.maximum(total, 1e-30))
    for i in range(refs.log_sums.shape[2]):
        rows = log_sums[i * LANES : (i + 1) * LANES]
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, rows.shape, axis) for axis in (0, 1))
        refs.log_sums[head, tile, pl.ds(i, 1)] = jnp.sum(jnp.where(row == lane, rows, 0.0), axis=0, keepdims=True)


def _attend_item(shape: KernelShape, refs: Refs, block: Any, index: Any, num_items: Any) -> None:
    item = read_item(shape, refs, index)

    def kv_block(j: Any, _: None) -> None:
        start_next(shape, refs, num_items)
        buffer = take_buffer(shape, refs)
        wait_for_pages(shape, refs, item, j, buffer)
        _attend_kv_block(shape, refs, item, block, j, buffer)

    jax.lax.fori_loop(0, num_kv_blocks(shape, item), kv_block, None)


def _attend_kv_block(shape: KernelShape, refs: Refs, item: Item, block: Any, j: Any, buffer: Any) -> None:
    position = (item.first_page + j * shape.block_pages) * shape.page_size
    live = jnp.minimum(item.kv_end - position, shape.kv_block_tokens)
    num_chunks = pl.cdiv(live, shape.chunk_tokens)
    _clear_dead_values(shape, refs, buffer, num_chunks, live)

    def chunk(c: Any, _: None) -> None:
        first, end = _tiles_that_see(shape, refs, item, block, position + c * shape.chunk_tokens)
        attend = lambda t, _: _attend_tile(shape, refs, item, block, buffer, c, position, t)  # noqa: E731
        jax.lax.fori_loop(first, end, attend, None)

    jax.lax.fori_loop(0, num_chunks, chunk, None)


def _chunk_slots(shape: KernelShape, chunk: Any) -> Any:
    return pl.ds(pl.multiple_of(chunk * shape.chunk_tokens, shape.chunk_tokens), shape.chunk_tokens)


def _clear_dead_values(shape: KernelShape, refs: Refs, buffer: Any, num_chunks: Any, live: Any) -> None:
    """Zeros behind the last live row, up to the end of the last chunk: their weights are 0, but 0 * NaN is not.

    Only the last page can hold NaN behind the live rows. Behind it are older pages, which were cleared so themselves, or what
    nobody has written yet, which is cleared once per buffer.
    """
    live_pages, end_page = pl.cdiv(live, shape.page_size), pl.cdiv(num_chunks * shape.chunk_tokens, shape.page_size)

    def clear(page: Any, _: None) -> None:
        _clear_page(shape, refs, buffer, page, jnp.maximum(live - page * shape.page_size, 0))

    jax.lax.fori_loop(live // shape.page_size, live_pages, clear, None)  # one page or none; `pl.when` would cost as if taken
    jax.lax.fori_loop(jnp.maximum(live_pages, refs.written_pages[buffer]), end_page, clear, None)
    refs.written_pages[buffer] = jnp.maximum(end_page, refs.written_pages[buffer])


def _clear_page(shape: KernelShape, refs: Refs, buffer: Any, page: Any, first: Any) -> None:
    """Zeros for the values of a page of the buffer, from its row `first` on."""
    slots = pl.ds(pl.multiple_of(page * shape.page_size, shape.page_size), shape.page_size)
    lanes = pl.ds(shape.layout.first_value_lane, shape.layout.value_lanes)

    def clear(head: Any) -> None:
        values = refs.kv[buffer, head, slots, lanes]
        row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        refs.kv[buffer, head, slots, lanes] = jnp.where(row < first, values.astype(jnp.float32), 0.0).astype(values.dtype)

    for_each(shape.num_kv_heads, shape.head_unroll, clear)


def _tiles_that_see(shape: KernelShape, refs: Refs, item: Item, block: Any, position: Any) -> tuple[Any, Any]:
    """First and end of the block's query tiles in which a query of the item sees a key of the chunk at `position`."""
    tile_tokens, block_start = shape.config.tile_tokens, block * shape.config.block_tokens
    first_token = jnp.maximum(item.first_token, position - item.position_of_token)
    end_token = item.end_token
    if shape.has_window:
        last_seen_by = position + shape.chunk_tokens - 1 + refs.window[0] - 1
        end_token = jnp.minimum(end_token, last_seen_by - item.position_of_token + 1)
    return (first_token - block_start) // tile_tokens, pl.cdiv(end_token - block_start, tile_tokens)


def _attend_tile(
    shape: KernelShape, refs: Refs, item: Item, block: Any, buffer: Any, chunk: Any, block_position: Any, tile: Any
) -> None:
    """One query tile and one chunk of keys, all heads."""
    config = shape.config
    first_token = block * config.block_tokens + tile * config.tile_tokens
    key_position = block_position + chunk * shape.chunk_tokens  # of the chunk's first key
    row_slices = [slice(first, first + PRODUCT_ROWS) for first in range(0, refs.q.shape[2], PRODUCT_ROWS)]

    def all_heads(masked: bool) -> None:
        columns = _seen_columns(shape, refs, item, first_token, key_position) if masked else None

        def step(g: Any, _: None) -> None:
            heads = [g * shape.head_unroll + i for i in range(shape.head_unroll)]
            parts = [_Part(refs, buffer, chunk, tile, head, rows) for head in heads for rows in row_slices]
            # A part's product stands before the softmax of the part before it, beside which it can run.
            scores = _scores(shape, parts[0], columns)
            for part, following in itertools.pairwise(parts):
                next_scores = _scores(shape, following, columns)
                _absorb(shape, part, scores)
                scores = next_scores
            _absorb(shape, parts[-1], scores)

        if shape.head_unroll == shape.num_kv_heads:
            step(0, None)
        else:
            jax.lax.fori_loop(0, shape.num_kv_heads // shape.head_unroll, step, None)

    if not config.split_masked:
        all_heads(masked=True)
        return
    last_token = first_token + config.tile_tokens - 1
    sees_all = (
        (first_token >= item.first_token)
        & (last_token < item.end_token)
        & (key_position + shape.chunk_tokens - 1 <= first_token + item.position_of_token)
    )
    if shape.has_positions:
        sees_all &= key_position + shape.chunk_tokens <= item.kv_end
    if shape.has_window:
        sees_all &= key_position > last_token + item.position_of_token - refs.window[0]
    pl.when(sees_all)(lambda: all_heads(masked=False))
    pl.when(~sees_all)(lambda: all_heads(masked=True))


class _Columns(NamedTuple):
    """Keys of a chunk that the rows of a tile see, int32 [tile_rows, 128]: begin:end, or :end if `begin` is None."""

    begin: Any
    end: Any


def _seen_columns(shape: KernelShape, refs: Refs, item: Item, first_token: Any, key_position: Any) -> _Columns:
    """For a tile that begins with `first_token` and a chunk that begins at `key_position`."""
    token = first_token + refs.token_of_row[...]
    is_mine = (token >= item.first_token) & (token < item.end_token)
    query_column = token + item.position_of_token - key_position
    begin = query_column - refs.window[0] + 1 if shape.has_window else None
    end = query_column + 1
    if shape.has_positions:
        end = jnp.minimum(end, item.kv_end - key_position)
    return _Columns(begin, jnp.where(is_mine, end, 0))


class _Part(NamedTuple):
    """One KV head and rows of one query tile, against one chunk of keys."""

    refs: Refs
    buffer: Any
    chunk: Any
    tile: Any
    head: Any
    rows: slice


def _scores(shape: KernelShape, part: _Part, columns: _Columns | None) -> jax.Array:
    """float32 [rows, chunk_tokens], in base 2. `columns` is None if all queries see all keys."""
    layout, slots = shape.layout, _chunk_slots(shape, part.chunk)
    q = part.refs.q[part.head, part.tile, part.rows]
    scores = _product(q, part.refs.kv[part.buffer, part.head, slots, pl.ds(0, layout.key_lanes)], transposed=True)
    if shape.has_scales:
        scores *= _chunk_scales(shape, part, 2 * part.head)
    if shape.soft_cap is not None:
        scores = jnp.tanh(scores) * (shape.soft_cap * LOG2_E)
    if columns is not None:
        column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        is_seen = column < _to_lanes(columns.end[part.rows], shape.chunk_tokens)
        if columns.begin is not None:
            is_seen &= column >= _to_lanes(columns.begin[part.rows], shape.chunk_tokens)
        scores = jnp.where(is_seen, scores, -jnp.inf)
    return scores


def _absorb(shape: KernelShape, part: _Part, scores: jax.Array) -> None:
    """Online softmax, and the weighted values."""
    layout, refs, here = shape.layout, part.refs, (part.head, part.tile, part.rows)
    before = refs.maximum[here]
    maximum = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _to_lanes(maximum, shape.chunk_tokens))
    shrink = jnp.exp2(before - maximum)
    refs.maximum[here] = maximum
    refs.total[here] = refs.total[here] * shrink + _sum_to_lanes(weights)
    if shape.has_scales:
        value_scales = _chunk_scales(shape, part, 2 * part.head + 1)
        weights *= jnp.where(jnp.abs(value_scales) < jnp.inf, value_scales, 0.0)  # those of dead slots may be NaN
    lanes = pl.ds(layout.first_value_lane, layout.value_lanes)
    values = refs.kv[part.buffer, part.head, _chunk_slots(shape, part.chunk), lanes]
    weighted = _product(weights.astype(refs.q.dtype), values, transposed=False)
    refs.weighted[here] = refs.weighted[here] * _to_lanes(shrink, layout.value_lanes) + weighted


def _product(left: jax.Array, right: jax.Array, *, transposed: bool) -> jax.Array:
    """left @ right, or left @ right.T, in float32. int8 keys and values are exact in bfloat16; float8 ones go to the matrix
    unit as they are, which multiplies them with bfloat16 (v5 and v6 by another exponent bias, for which Mosaic makes up)."""
    if right.dtype == jnp.int8 or left.dtype == jnp.float32:
        right = right.astype(left.dtype)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jax.lax.dot_general(left, right, contracted, precision=precision, preferred_element_type=jnp.float32)


def _chunk_scales(shape: KernelShape, part: _Part, row: Any) -> jax.Array:
    """float32 [1, chunk_tokens]: the scales of the chunk's keys (row 2h) or values (row 2h + 1)."""
    pages = shape.chunk_tokens // shape.page_size
    scales = [part.refs.kv_scales[part.buffer, part.chunk * pages + i, pl.ds(row, 1), :] for i in range(pages)]
    return scales[0] if pages == 1 else jnp.concatenate(scales, axis=1)


def _sum_to_lanes(x: jax.Array) -> jax.Array:
    """x [rows, columns] -> [rows, 128]: the columns of a lane added up."""
    if x.shape[1] < LANES:
        return jnp.pad(x, ((0, 0), (0, LANES - x.shape[1])))
    return functools.reduce(jnp.add, [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)])


def _to_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """x [rows, 128], the same in all lanes, with another number of them."""
    if lanes <= LANES:
        return x[:, :lanes]
    assert lanes % LANES == 0, f"{lanes} lanes"
    return jnp.concatenate([x] * (lanes // LANES), axis=1)
