"""Paged attention of rows with few queries (decode, speculative decode) on Hopper: split KV, bound by memory.

decode_plan divides the work. A stream is a producer warpgroup (decode_load) and a consumer warpgroup (here: wgmma and
online softmax); an SM runs `streams` of them, so that one's softmax hides behind another's loads. A segment's values go
unnormalised to `partial`, and a second kernel combines the segments of an item, a thread block for each query head.

The G query heads of a KV head are packed into wgmma's 64 rows, those of all the row's queries. Of one query these are the
aligned group of eight (or sixteen) lines of q that holds them, neighbours' heads included; several are brought side by side
before. Rows past the last group hold anything: rows do not mix, nobody reads those.

As built for sm_90a at head_dim 128, bfloat16 (read in the SASS): a warp of the consumer issues about 330 instructions for a
tile that is not at an end of a row, without a block-wide barrier; each of its four warps has a scheduler of the SM. With
float8_e4m3fn it is about 30 more than with int8, and the producer's warps issue 212 each, with int8 465, and meet twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import decode_load as loading
from jaxserve.kernels.pallas.gpu import dequant, softmax
from jaxserve.kernels.pallas.gpu.combine import Mean, weighted_mean
from jaxserve.kernels.pallas.gpu.combine import scratch as combine_scratch
from jaxserve.kernels.pallas.gpu.common import (
    LOG2E,
    ROW_GROUP,
    compiler_params,
    round_up,
    set_max_registers,
    transforms,
)
from jaxserve.kernels.pallas.gpu.decode_plan import (
    DecodeConfig,
    DecodePlan,
    M,
    Segment,
    Shape,
    for_each_segment,
    plan_decode,
    segments_of,
)

__all__ = ["DecodeConfig", "DecodePlan", "max_q_len", "paged_decode", "plan_decode", "unsupported"]

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))  # keys, values
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
MIN_QUANTIZED_PAGE = 32  # a page's scales must fill TMA's 128 bytes of shared memory
MAX_GROUP = 16


def max_q_len(group: int) -> int:
    """Queries per row, of `group` heads each, that a product has rows for."""
    return M // group


def unsupported(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    page_size: int,
    dtype: Any,
    kv_dtype: Any = None,
    q_len: int = 1,
    config: DecodeConfig | None = None,
) -> str | None:
    """Why a shape can not be had, as a sentence, or None."""
    head_dim_v = head_dim_v or head_dim
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    is_quantized = dequant.is_quantized(kv_dtype)
    config = config or DecodeConfig.for_heads(head_dim, head_dim_v, is_quantized=is_quantized)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"queries must be bfloat16 or float16, not {dtype.name}"
    if kv_dtype != dtype and not is_quantized:
        return f"the KV cache must be {dtype.name} like the queries, float8_e4m3fn or int8, not {kv_dtype.name}"
    if (head_dim, head_dim_v) not in HEAD_DIMS:
        return f"head_dim (keys, values) must be one of {', '.join(map(str, HEAD_DIMS))}, not ({head_dim}, {head_dim_v})"
    if page_size not in PAGE_SIZES:
        return f"page size must be one of {', '.join(map(str, PAGE_SIZES))}, not {page_size}"
    if is_quantized and page_size < MIN_QUANTIZED_PAGE:
        return f"page size must be {MIN_QUANTIZED_PAGE} or more with a {kv_dtype.name} KV cache, not {page_size}"
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_GROUP:
        return f"query heads per KV head must be 1 to {MAX_GROUP}, not {num_heads}/{num_kv_heads}"
    most = max_q_len(num_heads // num_kv_heads)
    if not 1 <= q_len <= most:
        return f"queries per row must be 1 to {most} with {num_heads // num_kv_heads} query heads per KV head, not {q_len}"
    return config.problem(head_dim, head_dim_v, is_quantized)


def paged_decode(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table: jax.Array,
    plan: DecodePlan,
    page_offset: jax.typing.ArrayLike,
    *,
    head_dim_v: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    config: DecodeConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """q [R, q_len, Hq, Dk] against a layer's pages: [R, q_len, Hq, Dv] in q's dtype, zeros where kv_len is 0.

    pool [P, Hkv, page_size, Dk + Dv]; scales float32 [P, Hkv, 2, page_size] if it is quantized; page_table int32
    [R, max_pages]; page_offset int32 scalar, added to page ids. Query i of a row with n stands at kv_len - n + i; behind its n
    queries the result is zero. The plan must have been made with the same q_len, heads, window and config.
    NotImplementedError with the reason for other shapes.
    """
    rows, q_len, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = pool.shape
    config = config or DecodeConfig()
    reason = unsupported(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=head_dim_v, page_size=page_size,
        dtype=q.dtype, kv_dtype=pool.dtype, q_len=q_len, config=config,
    )  # fmt: skip
    if reason is not None:
        raise NotImplementedError(f"Paged decode on Hopper: {reason}.")
    if plan.streams.shape[0] != config.num_streams:
        raise ValueError(f"The plan is for {plan.streams.shape[0]} streams, the config has {config.num_streams}.")
    shape = Shape(rows, q_len, num_heads, num_kv_heads, head_dim, head_dim_v, page_size, sliding_window, config)
    dtype = q.dtype
    if shape.is_gathered:
        q = q.reshape(rows, q_len, num_kv_heads, shape.group, head_dim).swapaxes(1, 2).reshape(rows, num_kv_heads, -1, head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, shape.live_rows - q.shape[2]), (0, 0)))
    attend = _attend_kernel(shape, softmax.Scoring(scale, soft_cap), dtype, pool.dtype, interpret)
    operands = (pool,) if scales is None else (pool, scales)
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    q = lax.bitcast_convert_type(q.reshape(-1, head_dim), dequant.tile_dtype(pool.dtype, dtype))  # as bits
    partial = attend(q, page_table, offset, *plan.arrays, *operands)
    combine = _combine_kernel(shape, dtype, sinks is not None, interpret)
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    return combine(*partial, *plan.arrays, *extra).reshape(rows, q_len, num_heads, head_dim_v)


def _attend_kernel(shape: Shape, scoring: softmax.Scoring, dtype: Any, kv_dtype: Any, interpret: Any) -> Any:
    """A function of (q, page table, page offset, plan's arrays, pool[, scales]) that gives partial values, peaks and totals.

    No automatic barriers. decode_load says why tiles and scales need none; queries and results are said at their places.
    """
    config, tile_dtype = shape.config, dequant.tile_dtype(kv_dtype, dtype)
    num_operands = 6 + dequant.is_quantized(kv_dtype)

    def body(*refs: Any) -> None:
        q, page_table, page_offset, *plan_refs = refs[:5]
        pool, scales = refs[5], (*refs[6:num_operands], None)[0]
        out, (sides, q_smem, out_smem, q_full, p_smem) = refs[num_operands : num_operands + 3], refs[num_operands + 3 :]
        plan = DecodePlan(*plan_refs)
        thread = lax.axis_index("wg")
        lane = lax.rem(thread, jnp.int32(config.streams)) if config.streams > 1 else 0
        stream = lax.axis_index("sm") * config.streams + lane
        ring = loading.Ring(shape, lane, loading.Side(*sides[0]), loading.Side(*sides[1]), *sides[2])

        @pl.when(thread < config.streams)
        def _consumer() -> None:
            _set_registers(config, config.consumer_registers, "increase")

            def visit(segment: Segment, done: Any) -> None:
                queries, scored = q_smem.at[lane], scoring
                _load_queries(shape, q, queries, q_full.at[lane], segment)
                if tile_dtype != dtype:  # in place, then commit_smem: each value is one warp's, and loaded before any is stored
                    unit = dequant.normalize_queries(queries, dtype)
                    scored = dataclasses.replace(scoring, scale=scoring.scale * unit)
                p = p_smem.at[lane] if interpret else None
                state = _attend(ring, scored, queries, p, segment, done)
                _store_segment(shape, state, out_smem.at[lane], *(ref.at[segment.number] for ref in out))

            for_each_segment(shape, plan, stream, visit)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(thread >= config.streams)
        def _producer() -> None:
            _set_registers(config, config.producer_registers, "decrease")
            source = loading.Source(pool, scales, page_table, page_offset[0])
            visit = functools.partial(loading.load_segment, ring, source)
            loading.finish(ring, for_each_segment(shape, plan, stream, visit))

    stats = jax.ShapeDtypeStruct((shape.num_segments, M), jnp.float32)
    partial = jax.ShapeDtypeStruct((shape.num_segments, shape.live_rows, _padded(shape.head_dim_v)), jnp.float32)
    out_columns = config.out_columns or shape.head_dim_v

    def buffer(rows: int, columns: int, dtype: Any) -> Any:
        return plgpu.SMEM((config.streams, rows, columns), dtype, transforms=transforms(columns, dtype))

    return plgpu.kernel(
        body,
        out_type=[partial, stats, stats],
        scratch_types=[
            loading.scratch(shape, tile_dtype, kv_dtype),
            buffer(M, shape.head_dim, tile_dtype),
            buffer(M, out_columns, jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=config.streams),
            buffer(M, config.block_kv, tile_dtype) if interpret else None,
        ],
        grid=(config.num_sms,),
        grid_names=("sm",),
        num_threads=2 * config.streams,
        thread_name="wg",
        compiler_params=compiler_params(auto_barriers=False),
        interpret=interpret,
        kernel_name="paged_decode",
    )


def _set_registers(config: DecodeConfig, count: int, action: Any) -> None:
    """Nothing to share out where two warpgroups have the SM to themselves: each thread has the most a thread can have."""
    if config.streams > 1:
        set_max_registers(count, action)


def _load_queries(shape: Shape, q: Any, q_smem: Any, barrier: Any, segment: Segment) -> None:
    """All threads are done with the segment before: they have met in _store_segment."""
    group = lax.div(shape.query_line(segment.row, segment.head), jnp.int32(ROW_GROUP))
    source, target = q.at[pl.ds(group * ROW_GROUP, shape.live_rows)], q_smem.at[pl.ds(0, shape.live_rows)]
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def _attend(
    ring: loading.Ring, scoring: softmax.Scoring, q_smem: Any, p_smem: Any | None, segment: Segment, done: Any
) -> softmax.Softmax:
    shape, block_kv = ring.shape, ring.shape.config.block_kv

    def step(tile: Any, state: softmax.Softmax) -> softmax.Softmax:
        index = done + (tile - segment.begin)
        slot = ring.slot(index)
        has_dead = _has_dead_tokens(shape, segment, tile)
        plgpu.barrier_wait(ring.k.full.at[slot])
        products = softmax.products(q_smem, ring.k.tiles.at[slot])
        plgpu.barrier_arrive(ring.k.free.at[slot])
        scales = offset = None
        if ring.is_quantized:
            scales = ring.scales.at[ring.scale_slot(index)]
            plgpu.barrier_wait(ring.scales_full.at[ring.scale_slot(index)])
            products = dequant.scale_columns(products, dequant.load_scales(scales.at[0]))
            pl.when(has_dead)(lambda: _clear_scales(scales.at[1]))
            if q_smem.dtype == jnp.float16:
                offset = dequant.offset_of_scales(dequant.load_scales(scales.at[1]), M)
        raw = _masked(shape, segment, tile, scoring.raw(products))
        state, weights = softmax.weigh(state, raw, scoring.factor, offset)
        plgpu.barrier_wait(ring.v.full.at[slot])

        @pl.when(has_dead)
        def _clear() -> None:
            start = tile * block_kv
            begin = None if shape.sliding_window is None else shape.first_seen(segment) - start
            softmax.clear_rows(ring.v.tiles.at[slot], segment.kv_len - start, begin)  # in place: each value is one thread's

        if scales is not None:  # loaded here, once more: held since the peak was taken they would cost registers
            weights = dequant.scale_columns(weights, dequant.load_scales(scales.at[1]))
        acc = softmax.add_values(state.acc, weights, ring.v.tiles.at[slot], p_smem)
        plgpu.barrier_arrive(ring.v.free.at[slot])
        return state._replace(acc=acc)

    return lax.fori_loop(segment.begin, segment.end, step, softmax.start(M, shape.head_dim_v))


def _clear_scales(scales: Any) -> None:
    """In place, though every warp holds all of them: what one has cleared remains as it is if another clears it again."""
    dequant.clear_scales(scales)
    plgpu.commit_smem()


def _has_dead_tokens(shape: Shape, segment: Segment, tile: Any) -> Any:
    """Whether some of a tile's tokens are seen by none of the row's queries; keys and values of those may be NaN."""
    block_kv = shape.config.block_kv
    has_dead = (tile + 1) * block_kv > segment.kv_len
    if shape.sliding_window is not None:
        has_dead |= tile * block_kv < shape.first_seen(segment)
    return has_dead


def _masked(shape: Shape, segment: Segment, tile: Any, raw: jax.Array) -> jax.Array:
    """-inf where a query does not see a token; only tiles at the ends of what the row sees pay for it."""
    block_kv = shape.config.block_kv
    is_edge = (tile + 1) * block_kv > segment.kv_len - (shape.q_len - 1)
    if shape.sliding_window is not None:
        is_edge |= tile * block_kv <= segment.kv_len - 1 - shape.sliding_window

    def mask(raw: jax.Array) -> jax.Array:
        position = softmax.columns(M, block_kv) + tile * block_kv
        if shape.q_len == 1:
            query: Any = segment.kv_len - 1
        else:
            row = plgpu.broadcasted_iota(jnp.int32, (M, block_kv), 0, layout=plgpu.Layout.WGMMA)
            query = lax.div(row, jnp.full_like(row, shape.group)) + (segment.kv_len - segment.num_queries)
        seen = position <= query
        if shape.sliding_window is not None:
            seen &= position > query - shape.sliding_window
        return jnp.where(seen, raw, -jnp.inf)

    return lax.cond(is_edge, mask, lambda raw: raw, raw)


def _store_segment(shape: Shape, state: softmax.Softmax, out_smem: Any, partial: Any, peaks: Any, totals: Any) -> None:
    """A segment's result: acc by TMA, live rows only; peak and total from registers.

    The threads meet in both: in wait_smem_to_gmem after their last product, in commit_smem before one starts the copy.
    """
    width = shape.config.out_columns or shape.head_dim_v
    for column in range(0, shape.head_dim_v, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[...] = state.acc[:, column : column + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, shape.live_rows)], partial.at[:, pl.ds(column, width)])
    peaks[...] = state.peak
    totals[...] = state.total


def _padded(head_dim_v: int) -> int:
    return round_up(head_dim_v, 128)  # the combining warpgroups' threads hold one or two elements each


def _combine_kernel(shape: Shape, dtype: Any, has_sinks: bool, interpret: Any) -> Any:
    """A thread block per query head: the weighted mean of its item's segments, zeros where there are none."""
    columns, warpgroups = _padded(shape.head_dim_v), shape.combine_warpgroups

    def body(partial: Any, peaks: Any, totals: Any, *refs: Any) -> None:
        plan, (sinks, out, out_smem, *scratch) = DecodePlan(*refs[:2]), refs[2:] if has_sinks else (None, *refs[2:])
        token, head, wg = (lax.axis_index(name) for name in ("token", "head", "wg"))
        row, query = lax.div(token, jnp.int32(shape.q_len)), lax.rem(token, jnp.int32(shape.q_len))
        kv_head, g = lax.div(head, jnp.int32(shape.group)), lax.rem(head, jnp.int32(shape.group))
        line = query * shape.group + lax.rem(shape.query_line(row, kv_head), jnp.int32(ROW_GROUP)) + g
        first, end = segments_of(shape, plan, row, kv_head, query)

        def load(number: Any) -> Mean:
            at = jnp.minimum(first + number, end - 1)
            return Mean(partial[at, line], jnp.where(first + number < end, peaks[at, line], -jnp.inf), totals[at, line])

        start = Mean.empty(columns)
        if sinks is not None:
            start = Mean(start.value, jnp.where(wg == 0, sinks[head] * LOG2E, start.peak), jnp.where(wg == 0, 1.0, 0.0))
        unroll = shape.config.combine_unroll
        mean = weighted_mean(load, end - first, start, scratch, warpgroups=warpgroups, unroll=unroll)

        @pl.when(wg == 0)
        def _write() -> None:
            if out_smem is None:
                out.at[token, head][...] = mean.normalized.astype(dtype)
                return
            out_smem[...] = mean.normalized.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, shape.head_dim_v)], out.at[token, head])
            plgpu.wait_smem_to_gmem(0)

    out_smem = plgpu.SMEM((columns,), dtype) if shape.head_dim_v < columns else None
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.rows * shape.q_len, shape.num_heads, shape.head_dim_v), dtype),
        scratch_types=[out_smem, *combine_scratch(warpgroups, columns)],
        grid=(shape.rows * shape.q_len, shape.num_heads),
        grid_names=("token", "head"),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=compiler_params(auto_barriers=False),  # shared memory is written once: see _write and combine
        interpret=interpret,
        kernel_name="paged_decode_combine",
    )
