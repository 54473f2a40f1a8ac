"""The kernel of MLA decode: what the two warpgroups of a thread block do with their stretch of the line of KV tiles (`mla`).

Within a thread block two warpgroups compute. A 64 x 512 output exceeds one warpgroup's registers, so each holds half of the
columns; tiles of 64 tokens belong to them by turns (FlashMLA's idea, DeepSeek 2025). A tile's owner computes scores and
softmax and hands over row maxima, so that the other can rescale its half meanwhile, then weights; both then add the weights'
product with their half of the values. Each sums the weights of its own tiles; the sums meet when a row is done. A tile is key
and value at once, and its rope columns, no values, are dead once the scores are known: the weights take their place.

There is no producer warpgroup. A tile's owner fetches its next tile as soon as both are done with this one, which is when a
producer would; so there are 255 registers for each thread without setmaxnreg, which compilers may ignore.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import softmax
from jaxserve.kernels.pallas.gpu.common import compiler_params, transforms
from jaxserve.kernels.pallas.gpu.mla_plan import (
    CONSUMERS,
    HALF,
    LATENT,
    QUERY_PIECES,
    ROPE,
    ROW,
    TILE,
    M,
    Row,
    Shape,
    Worker,
)

PAGES_AHEAD = 4  # page ids that a consumer holds in registers over a product: there is no room for those of smaller pages


class _State(NamedTuple):
    """What a consumer carries from tile to tile, float32."""

    acc: jax.Array  # [M, HALF] its columns of the weighted values
    peak: jax.Array  # [M] largest score so far, base 2
    total: jax.Array  # [M] sum of its own tiles' weights


class _Item(NamedTuple):
    """A worker's part of one row, traced scalars."""

    row: Any
    table_row: Any
    kv_len: Any
    begin: Any  # in the row's tiles
    count: Any
    is_whole: Any
    slot: Any

    @staticmethod
    def read(plan_rows: Any, worker: Worker, worker_index: Any, index: Any) -> _Item:
        about = Row.read(plan_rows, index)
        begin, end = jnp.maximum(about.start, worker.start), jnp.minimum(about.end, worker.end)
        slot = 2 * worker_index + jnp.where(begin > worker.start, 1, 0)
        is_whole = jnp.where(end - begin == about.end - about.start, 1, 0)
        first = about.first_tile + begin - about.start
        return _Item(about.row, about.table_row, about.kv_len, first, end - begin, is_whole, slot)


class _Refs(NamedTuple):
    """The kernel's arrays and shared memory."""

    q: Any  # [R, blocks, m, ROW]
    pool: Any
    page_table: Any
    page_offset: Any
    out: Any  # [R, blocks, m, LATENT]
    parts: Any  # [2, slots, blocks, m, LATENT]: a partial result, and what rounding took from it
    part_logs: Any  # float32 [slots, blocks, M]: base-2 logarithm of the part's sum of exponentials
    logs: Any  # float32 [R, blocks, M]: the same of whole rows; None if nobody asks
    q_latent: Any  # [CONSUMERS, M, HALF], and the consumers' results in the end
    q_rope: Any  # [M, ROPE]
    kv: Any  # [CONSUMERS, TILE, ROW]
    stats: Any  # float32 [CONSUMERS, 2, M]: peak with a tile of theirs, total in the end
    numbers: Any  # int32 [CONSUMERS]: each consumer's number, see _own_tile
    kv_full: Any
    kv_free: Any  # both consumers are done with the tile
    q_full: Any
    peaked: Any  # the peak with the tile is there
    weighed: Any  # the tile's weights are there
    summed: Any  # both totals are there


def _pages(s: Shape, refs: _Refs, item: _Item, tile: Any) -> tuple[Any, ...]:
    """Pages of a tile. Past the row's last page, that one stands in for the others: the table is garbage there."""
    first, last = lax.div(tile * TILE, s.page_size), lax.div(item.kv_len - 1, s.page_size)
    return tuple(refs.page_table[item.table_row, jnp.minimum(first + i, last)] for i in range(s.copies))


def _fetch_tile(s: Shape, refs: _Refs, wg: int, tile: Any, pages: tuple[Any, ...]) -> None:
    offset = refs.page_offset[0]
    start = lax.rem(tile * TILE, s.page_size) if s.page_size > TILE else 0
    for i, page in enumerate(pages):
        source = refs.pool.at[offset + page, 0, pl.ds(start, s.copy_rows)]
        target = refs.kv.at[wg, pl.ds(i * s.copy_rows, s.copy_rows)]
        plgpu.copy_gmem_to_smem(source, target, refs.kv_full.at[wg])


def _fetch_queries(s: Shape, refs: _Refs, wg: int, row: Any) -> None:
    """The pieces whose place belongs to this consumer; the rope part goes with the first."""
    pieces = _query_pieces(refs)
    for target, columns in (pieces[0], pieces[2]) if wg == 0 else (pieces[1],):
        source = refs.q.at[row, lax.axis_index("block"), :, columns]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, s.m)], refs.q_full)


def _query_pieces(refs: _Refs, zero: Any = 0) -> list[tuple[Any, Any]]:
    """The queries in shared memory with their columns; in pieces, since TMA takes only contiguous results from there."""
    pieces = [(refs.q_latent.at[i + zero], pl.ds(i * HALF, HALF)) for i in range(CONSUMERS)]
    return [*pieces, (refs.q_rope, pl.ds(LATENT, ROPE))]


def _products(refs: _Refs, kv: Any, zero: Any) -> jax.Array:
    """Queries times a tile's tokens, float32 [M, TILE]."""

    def multiply(acc: Any) -> jax.Array:
        for piece, columns in _query_pieces(refs, zero):
            plgpu.wgmma(acc, piece, kv.at[:, columns].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((M, TILE), jnp.float32))


def _spread(vector: Any, columns: int) -> Any:
    return lax.broadcast_in_dim(vector, (M, columns), [0])


def _mask(s: Shape, item: _Item, tile: Any, scores: Any) -> Any:
    """-inf where a query may not look; only tiles at the ends of what the row sees pay for it."""
    end = item.kv_len - s.q_len + 1 - tile * TILE  # of what query 0 sees
    is_edge = end < TILE
    if s.sliding_window is not None:
        is_edge |= end + s.q_len - 1 > s.sliding_window

    def mask(scores: Any) -> Any:
        column = softmax.columns(M, TILE)
        if s.q_len > 1:
            row = plgpu.broadcasted_iota(jnp.int32, (M, TILE), 0, layout=plgpu.Layout.WGMMA)
            row = row + lax.axis_index("block") * s.m
            for query in range(1, s.q_len):
                column = column - jnp.where(row >= query * s.num_heads, 1, 0)
        visible = column < end
        if s.sliding_window is not None:
            visible = visible & (column >= end - s.sliding_window)
        return jnp.where(visible, scores, -jnp.inf)

    return lax.cond(is_edge, mask, lambda scores: scores, scores)


def _clear_dead(s: Shape, item: _Item, tile: Any, kv: Any) -> None:
    """Zeros instead of values that no query sees: they may be NaN, which a weight of 0 does not undo."""
    low, high = jnp.int32(0), item.kv_len - tile * TILE
    if s.sliding_window is not None:
        low = high - s.q_len + 1 - s.sliding_window

    @pl.when((low > 0) | (high < TILE))
    def _clear() -> None:
        row = plgpu.broadcasted_iota(jnp.int32, (TILE, ROPE), 0, layout=plgpu.Layout.WGMMA)
        for start in range(0, LATENT, ROPE):  # piece by piece: the accumulator leaves few registers
            piece = kv.at[:, pl.ds(start, ROPE)]
            value = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
            piece[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros((), s.dtype))
        plgpu.commit_smem()


def _rescale(acc: Any, shrink: Any, is_first: Any) -> Any:
    """In a branch, which the compiler leaves where it stands: it would have the other consumer wait for this, or us for it."""
    return lax.cond(is_first, lambda acc: acc, lambda acc: acc * _spread(shrink, HALF), acc)


def _add_values(s: Shape, acc: Any, wg: int, kv: Any) -> Any:
    """acc + weights @ values; the interpreter knows no accumulator with a start value."""
    weights, values = kv.at[:, pl.ds(LATENT, TILE)], kv.at[:, pl.ds(wg * HALF, HALF)]
    if not s.is_interpreted:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))

    def multiply(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, weights, values)
        return ref[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC((M, HALF), jnp.float32))


def _own_tile(s: Shape, refs: _Refs, item: _Item, wg: int, j: Any, state: _State) -> _State:
    """Scores and weights of a tile of this consumer's, handed over; its half of the values added; its next tile fetched."""
    tile = item.begin + j
    # Not the constant wg: from a constant the compiler would compute all 72 operands' addresses of the scores ahead of the
    # loop and spill them, and know which tile is not the first.
    own = refs.numbers[wg]
    kv = refs.kv.at[own]
    plgpu.barrier_wait(refs.kv_full.at[wg])
    _clear_dead(s, item, tile, kv)
    raw = _mask(s, item, tile, s.scoring.raw(_products(refs, kv, own - wg)))
    factor = s.scoring.factor
    peak = jnp.maximum(state.peak, raw.max(axis=1) * factor)
    refs.stats.at[wg, 0][...] = peak
    plgpu.barrier_arrive(refs.peaked.at[wg])
    weights = jnp.exp2(raw * factor - _spread(peak, TILE))
    shrink = jnp.exp2(state.peak - peak)
    total = state.total * shrink + weights.sum(axis=1)
    kv.at[:, pl.ds(LATENT, TILE)][...] = weights.astype(s.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.weighed.at[wg])
    read_pages = functools.partial(_pages, s, refs, item, tile + CONSUMERS)
    pages = read_pages() if s.copies <= PAGES_AHEAD else None  # here: the scores' registers are free, the product hides it
    acc = _add_values(s, _rescale(state.acc, shrink, j - wg + own == 0), wg, kv)
    plgpu.barrier_arrive(refs.kv_free.at[wg])  # one thread fetches, but all of our own have to be done, too
    plgpu.barrier_wait(refs.kv_free.at[wg])

    @pl.when(j + CONSUMERS < item.count)
    def _fetch() -> None:
        _fetch_tile(s, refs, wg, tile + CONSUMERS, pages or read_pages())

    return _State(acc, peak, total)


def _other_tile(s: Shape, refs: _Refs, wg: int, j: Any, state: _State) -> _State:
    """A tile of the other consumer's: its weights are taken over, and while they are made, what is there is rescaled."""
    other = 1 - wg
    slot = 1 - refs.numbers[wg]
    plgpu.barrier_wait(refs.peaked.at[other])
    peak = plgpu.load(refs.stats.at[other, 0], layout=plgpu.Layout.WGMMA.reduce(1))
    shrink = jnp.exp2(state.peak - peak)
    acc = _rescale(state.acc, shrink, j - other + slot == 0)
    plgpu.barrier_wait(refs.weighed.at[other])
    acc = _add_values(s, acc, wg, refs.kv.at[slot])
    plgpu.barrier_arrive(refs.kv_free.at[other])
    return _State(acc, peak, state.total * shrink)


def _add_totals(refs: _Refs, wg: int, state: _State) -> _State:
    """Both consumers have seen all tiles by now, so their peaks are the same."""
    refs.stats.at[wg, 1][...] = state.total
    plgpu.barrier_arrive(refs.summed)
    plgpu.barrier_wait(refs.summed)
    return state._replace(total=state.total + plgpu.load(refs.stats.at[1 - wg, 1], layout=plgpu.Layout.WGMMA.reduce(1)))


def _attend(s: Shape, refs: _Refs, wg: int, item: _Item) -> _State:
    """Consumer 0 owns tiles 0, 2, ..; consumer 1 the others, so for it the first is the other's."""
    plgpu.barrier_wait(refs.q_full)
    state = _State(*softmax.start(M, HALF))
    if wg == 1:
        state = _other_tile(s, refs, wg, 0, state)
    remaining = item.count - wg

    def pair(i: Any, state: _State) -> _State:
        j = wg + CONSUMERS * i
        return _other_tile(s, refs, wg, j + 1, _own_tile(s, refs, item, wg, j, state))

    def last(_: Any, state: _State) -> _State:
        return _own_tile(s, refs, item, wg, item.count - 1, state)

    state = lax.fori_loop(0, lax.div(remaining, CONSUMERS), pair, state)
    state = lax.fori_loop(0, lax.rem(remaining, CONSUMERS), last, state)
    return _add_totals(refs, wg, state)


def _consume(s: Shape, refs: _Refs, wg: int, plan_rows: Any, plan_workers: Any) -> None:
    """All of a worker's items; the next one's first tile is on its way before a result leaves."""
    index = lax.axis_index("worker")
    worker = Worker(*(plan_workers[index, i] for i in range(len(Worker._fields))))

    def read(line: Any) -> _Item:
        return _Item.read(plan_rows, worker, index, jnp.minimum(line, s.num_rows - 1))

    def fetch_first(item: _Item) -> None:
        @pl.when(item.count > wg)
        def _fetch() -> None:
            tile = item.begin + wg
            _fetch_tile(s, refs, wg, tile, _pages(s, refs, item, tile))

    def step(line: Any, item: _Item) -> _Item:
        following, has_more = read(line + 1), line + 1 < worker.last
        state = _attend(s, refs, wg, item)
        pl.when(has_more)(lambda: fetch_first(following))
        _store(s, refs, item, wg, state)
        pl.when(has_more)(lambda: _fetch_queries(s, refs, wg, following.row))
        return following

    refs.numbers[wg] = jnp.int32(wg)
    item = read(worker.first)

    @pl.when(worker.first < worker.last)
    def _start() -> None:
        _fetch_queries(s, refs, wg, item.row)
        fetch_first(item)

    lax.fori_loop(worker.first, worker.last, step, item)


def _store(s: Shape, refs: _Refs, item: _Item, wg: int, state: _State) -> None:
    """The result of a whole row, or a part of one. Scores of both consumers are done by now: the queries' place is free."""
    result = state.acc * _spread(jnp.where(state.total > 0, 1 / state.total, 0.0), HALF)
    smem, block = refs.q_latent.at[wg], lax.axis_index("block")

    def send(target: Any) -> None:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, s.m)], target.at[block, :, pl.ds(wg * HALF, HALF)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def send_logs(target: Any) -> None:
        if wg == 0:
            target.at[block][...] = state.peak + jnp.log2(state.total)

    smem[...] = result.astype(s.dtype)

    @pl.when(item.is_whole == 1)
    def _whole() -> None:
        send(refs.out.at[item.row])
        if s.has_log_sums:
            send_logs(refs.logs.at[item.row])

    @pl.when(item.is_whole == 0)
    def _part() -> None:
        send(refs.parts.at[0, item.slot])
        rounded = plgpu.load(smem, layout=plgpu.Layout.WGMMA)
        smem[...] = (result - rounded.astype(jnp.float32)).astype(s.dtype)
        send(refs.parts.at[1, item.slot])
        send_logs(refs.part_logs.at[item.slot])


def attend_kernel(s: Shape, interpret: Any) -> Any:
    """(plan rows, plan workers, q, pool, page_table, page_offset) -> (out, parts, part_logs), and logs if there are any."""

    def body(plan_rows: Any, plan_workers: Any, *given: Any) -> None:
        arrays = list(given)
        if not s.has_log_sums:
            arrays.insert(_Refs._fields.index("logs"), None)
        for wg in range(CONSUMERS):
            pl.when(lax.axis_index("wg") == wg)(functools.partial(_consume, s, _Refs(*arrays), wg, plan_rows, plan_workers))

    slots = 2 * s.num_workers
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.num_rows, s.blocks, s.m, LATENT), s.dtype),
            jax.ShapeDtypeStruct((2, slots, s.blocks, s.m, LATENT), s.dtype),
            jax.ShapeDtypeStruct((slots, s.blocks, M), jnp.float32),
            *([jax.ShapeDtypeStruct((s.num_rows, s.blocks, M), jnp.float32)] if s.has_log_sums else []),
        ),
        scratch_types=_scratch(s),
        grid=(s.num_workers, s.blocks),
        grid_names=("worker", "block"),
        num_threads=CONSUMERS,
        thread_name="wg",
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="mla_decode",
    )


def _scratch(s: Shape) -> list[Any]:
    """In the order of _Refs."""
    swizzled = functools.partial(plgpu.SMEM, dtype=s.dtype, transforms=transforms(ROPE, s.dtype))
    return [
        swizzled((CONSUMERS, M, HALF)),
        swizzled((M, ROPE)),
        swizzled((CONSUMERS, TILE, ROW)),
        plgpu.SMEM((CONSUMERS, 2, M), jnp.float32),
        plgpu.SMEM((CONSUMERS,), jnp.int32),
        plgpu.Barrier(num_arrivals=s.copies, num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=QUERY_PIECES, num_barriers=1),
        plgpu.Barrier(num_barriers=CONSUMERS),
        plgpu.Barrier(num_barriers=CONSUMERS),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=1),
    ]
