"""Ragged paged attention on TPUs in Pallas: the calls of the kernel in kernel for a step that plan has divided."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.pallas.tpu.fetch import NUM_PROGRESS, KernelShape, Refs
from jaxserve.kernels.pallas.tpu.kernel import LOG2_E, NO_WINDOW, attention_kernel
from jaxserve.kernels.pallas.tpu.layout import (
    LANES,
    RowLayout,
    compiler_params,
    kept_in_hbm,
    pack_queries,
    token_of_row,
    tokens_of_tiles,
    unpack_tokens,
)
from jaxserve.kernels.pallas.tpu.merge import merge_decoded, tokens_are_whole_tiles
from jaxserve.kernels.pallas.tpu.plan import PassPlan, TpuPlan
from jaxserve.kernels.pallas.tpu.tuning import TYPICAL_CONTEXT


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the passes of a step have in common."""

    pool: jax.Array
    scales: jax.Array | None
    page_table: jax.Array  # [R, 1, max_pages]
    page_offset: jax.typing.ArrayLike
    layout: RowLayout
    scale: float
    sliding_window: Any
    soft_cap: float | None
    sinks: jax.Array | None
    vmem_limit_bytes: int | None
    interpret: Any
    checked: bool
    has_log_sums: bool = False

    def shape(self, plan: PassPlan) -> KernelShape:
        return KernelShape(
            layout=self.layout,
            num_kv_heads=self.pool.shape[1],
            page_size=self.pool.shape[2],
            pages_per_row=self.page_table.shape[2],
            config=plan.config,
            has_window=self.sliding_window is not None,
            soft_cap=self.soft_cap,
            has_sinks=self.sinks is not None,
            has_scales=self.scales is not None,
            has_positions=plan.position is not None,
            has_log_sums=self.has_log_sums,
        )


class _PassResult(NamedTuple):
    out: jax.Array  # [Hkv, tokens of the pass or more, G, value_lanes]; zeros for tokens that are in no item
    log_sums: jax.Array | None  # float32 [Hkv, tokens or more, G, 1]


class PartialAttention(NamedTuple):
    """Over a part of the keys; `log_sums` are the weights by which parts are merged."""

    out: jax.Array  # [T, Hq, value_dim]
    log_sums: jax.Array  # float32 [T, Hq] natural logs of the sums of exp(score); about -1e30 where a query sees no key


def paged_attention(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    plan: TpuPlan,
    page_offset: jax.typing.ArrayLike,
    *,
    layout: RowLayout,
    scale: float,
    sliding_window: Any = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    vmem_limit_bytes: int | None = None,
    interpret: Any = False,
    checked: bool = False,
) -> jax.Array:
    """q [T, Hq, key_dim] -> [T, Hq, value_dim], as AttentionBackend.ragged_paged_attention has it.

    pool [P, Hkv, page_size, width] and its scales are write's. sliding_window may be an int32 scalar of the device.
    """
    (_, Hq, _), (_, Hkv, _, width) = q.shape, pool.shape
    assert width == layout.width and Hq % Hkv == 0, f"pool {pool.shape} for queries {q.shape} and {layout}"
    options = (scale, sliding_window, soft_cap, sinks, vmem_limit_bytes, interpret, checked)
    call = _Call(pool, scales, plan.page_table, page_offset, layout, *options)
    if plan.extend is None:
        assert plan.decode is not None
        out = _run_pass(call, q, plan.decode, "paged_decode", num_items=plan.page_table.shape[0]).out
        return unpack_tokens(layout.value_of(out), q.shape[0])
    extended = _run_pass(call, q, plan.extend, "paged_extend", num_items=plan.extend.num_blocks).out
    if plan.decode is None:
        return unpack_tokens(layout.value_of(extended), q.shape[0])
    tokens, place = plan.decode_tokens, plan.decode_place
    assert tokens is not None and place is not None, "a plan with both passes knows the decode rows' tokens"
    decoded = _run_pass(call, q[tokens], plan.decode, "paged_decode", num_items=plan.page_table.shape[0]).out
    if tokens_are_whole_tiles(Hq // Hkv, layout.value_lanes, q.dtype):
        merged = merge_decoded(extended, decoded, plan, interpret=interpret, checked=checked)
        return unpack_tokens(layout.value_of(merged), q.shape[0])
    extended, decoded = (unpack_tokens(layout.value_of(x), n) for x, n in ((extended, q.shape[0]), (decoded, tokens.shape[0])))
    return jnp.where((place >= 0)[:, None, None], decoded[jnp.maximum(place, 0)], extended)


def decode_attention(
    q: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    plan: TpuPlan,
    page_offset: jax.typing.ArrayLike,
    *,
    layout: RowLayout,
    scale: float,
    vmem_limit_bytes: int | None = None,
    interpret: Any = False,
    checked: bool = False,
) -> PartialAttention:
    """`paged_attention` of a step of decode rows, with log sums: the keys are a part of those that there are."""
    assert plan.decode is not None and plan.extend is None, "the plan is of a step with prompts"
    options = (scale, None, None, None, vmem_limit_bytes, interpret, checked)
    call = _Call(pool, scales, plan.page_table, page_offset, layout, *options, has_log_sums=True)
    return _partial(_run_pass(call, q, plan.decode, "paged_decode", num_items=plan.page_table.shape[0]), layout, q.shape[0])


def extend_attention(
    q: jax.Array,
    pool: jax.Array,
    plan: PassPlan,
    page_table: jax.Array,
    page_offset: jax.typing.ArrayLike,
    *,
    layout: RowLayout,
    scale: float,
    vmem_limit_bytes: int | None = None,
    interpret: Any = False,
    checked: bool = False,
) -> PartialAttention:
    """One extend pass over all rows of a plan. q [T, Hq, key_dim]; page_table [R, 1, max_pages].

    pool [groups, P, Hkv, page_size, width] has Hkv KV heads of each group of heads, one group after the other: as many as VMEM
    has room for at a time. Zeros for tokens that are in no item.
    """
    (T, Hq, _), (groups, num_pages, Hkv, _, width) = q.shape, pool.shape
    assert width == layout.width and Hq % (groups * Hkv) == 0, f"pool {pool.shape} for queries {q.shape} and {layout}"
    pages = pool.reshape(groups * num_pages, *pool.shape[2:])

    def attend(q: jax.Array, group: jax.typing.ArrayLike) -> PartialAttention:
        options = (scale, None, None, None, vmem_limit_bytes, interpret, checked)
        call = _Call(pages, None, page_table, page_offset + group * num_pages, layout, *options, has_log_sums=True)
        return _partial(_run_pass(call, q, plan, "paged_extend", num_items=plan.num_blocks), layout, T)

    if groups == 1:
        return attend(q, 0)
    by_group = q.reshape(T, groups, Hq // groups, -1).swapaxes(0, 1)
    out, log_sums = jax.lax.map(lambda group: attend(*group), (by_group, jnp.arange(groups, dtype=jnp.int32)))
    return PartialAttention(out.swapaxes(0, 1).reshape(T, Hq, -1), log_sums.swapaxes(0, 1).reshape(T, Hq))


def _partial(result: _PassResult, layout: RowLayout, num_tokens: int) -> PartialAttention:
    assert result.log_sums is not None, "the call asks for them"
    log_sums = unpack_tokens(result.log_sums, num_tokens)[..., 0]
    return PartialAttention(unpack_tokens(layout.value_of(result.out), num_tokens), log_sums)


def _run_pass(call: _Call, q: jax.Array, plan: PassPlan, name: str, num_items: int) -> _PassResult:
    """q [tokens of the pass, Hq, key_dim]. `num_items`: how many items to tell XLA of."""
    (_, Hq, _), Hkv, config, layout = q.shape, call.pool.shape[1], plan.config, call.layout
    # tanh takes scores in units of the cap; else they go to base 2 at once.
    folded = call.scale * LOG2_E if call.soft_cap is None else call.scale / call.soft_cap
    scaled = (q.astype(jnp.float32) * folded).astype(q.dtype)
    num_tiles = plan.num_blocks * (config.block_tokens // config.tile_tokens)
    packed = pack_queries(scaled, Hkv, config.tile_tokens, num_tiles, layout.key_lanes)
    row_token = jnp.asarray(token_of_row(config.tile_tokens, Hq // Hkv))
    row_sinks = None if call.sinks is None else _sinks_of_rows(call.sinks, Hkv, config.tile_tokens, packed.shape[2])
    window = NO_WINDOW if call.sliding_window is None else jnp.minimum(call.sliding_window, NO_WINDOW)
    scalars = (
        plan.block_items,
        plan.item_block,
        plan.item_row,
        plan.q_start,
        plan.q_len,
        plan.kv_len,
        plan.position,
        jnp.asarray(call.page_offset, jnp.int32).reshape(1),
        jnp.asarray(window, jnp.int32).reshape(1),
    )
    cost = _cost(call, q, num_items)
    out, *log_sums = _call_kernel(call, plan, scalars, packed, row_token, row_sinks, name, cost)
    by_row = [x.reshape(Hkv, num_tiles, -1, 1) for x in log_sums]
    results = [tokens_of_tiles(x, config.tile_tokens, Hq // Hkv) for x in (out, *by_row)]
    return _PassResult(results[0], results[1] if call.has_log_sums else None)


def _cost(call: _Call, q: jax.Array, num_items: int) -> pl.CostEstimate:
    """What XLA schedules other work by.

    Lengths are not known here. Assumed: no token is padding, each sees TYPICAL_CONTEXT keys (fewer if the page table or a
    static window has fewer), and the keys are read once per item. The page table's capacity would be the upper bound, but
    with 128k tokens per row it would say a hundred times what a usual step takes. In a mixed step every row counts as a
    decode row and every token as one of the extend pass, as if neither pass knew of the other.
    """
    (T, Hq, _), (_, Hkv, page_size, width) = q.shape, call.pool.shape
    layout, kv_bytes = call.layout, call.pool.dtype.itemsize
    context = min(TYPICAL_CONTEXT, call.page_table.shape[2] * page_size)
    if isinstance(call.sliding_window, int):
        context = min(context, call.sliding_window)
    scores = T * Hq * context
    token_bytes = Hkv * (width * kv_bytes + (8 if call.scales is not None else 0))
    query_bytes = T * Hq * (layout.key_lanes + layout.value_lanes) * q.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * scores * (layout.key_lanes + layout.value_lanes),
        transcendentals=scores * (1 if call.soft_cap is None else 2),
        bytes_accessed=num_items * context * token_bytes + query_bytes,
    )


def _sinks_of_rows(sinks: jax.Array, num_kv_heads: int, tile_tokens: int, rows: int) -> jax.Array:
    """sinks [Hq] -> float32 [Hkv, tile_rows, 128] in base 2."""
    grouped = sinks.astype(jnp.float32).reshape(num_kv_heads, 1, -1) * LOG2_E
    tiled = jnp.broadcast_to(grouped, (num_kv_heads, tile_tokens, grouped.shape[2])).reshape(num_kv_heads, -1)
    tiled = jnp.pad(tiled, ((0, 0), (0, rows - tiled.shape[1])))
    return jnp.broadcast_to(tiled[..., None], (*tiled.shape, LANES))


def _call_kernel(
    call: _Call,
    plan: PassPlan,
    scalars: tuple[jax.Array | None, ...],
    q: jax.Array,
    row_token: jax.Array,
    row_sinks: jax.Array | None,
    name: str,
    cost: pl.CostEstimate,
) -> list[jax.Array]:
    """q as pack_queries has it -> the same with value_lanes; and log sums, if the call has them, a lane for each row."""
    shape, layout, config = call.shape(plan), call.layout, plan.config
    Hkv, num_tiles, rows, _ = q.shape
    block_tiles = config.block_tokens // config.tile_tokens

    def tiles(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((Hkv, block_tiles, rows, lanes), lambda block, *_: (0, block, 0, 0))

    whole, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = [
        (q, tiles(layout.key_lanes)),
        (row_token, whole),
        (row_sinks, whole),
        (kept_in_hbm(call.page_table, call.interpret), in_hbm),
        (kept_in_hbm(call.pool, call.interpret), in_hbm),
        (kept_in_hbm(call.scales, call.interpret), in_hbm),
    ]
    scratch = _scratch(shape, call.pool.dtype, (Hkv, block_tiles, rows))
    outputs = [(jax.ShapeDtypeStruct((*q.shape[:3], layout.value_lanes), q.dtype), tiles(layout.value_lanes))]
    if shape.has_log_sums:
        row_groups = pl.cdiv(rows, LANES)
        spec = pl.BlockSpec((Hkv, block_tiles, row_groups, LANES), lambda block, *_: (0, block, 0, 0))
        outputs.append((jax.ShapeDtypeStruct((Hkv, num_tiles, row_groups, LANES), jnp.float32), spec))
    given_in = [x is not None for x in (*scalars, *(x for x, _ in inputs))]
    present = [*given_in, True, shape.has_log_sums, *(x is not None for x in scratch)]

    def kernel(*given: Any) -> None:
        remaining = iter(given)
        attention_kernel(shape, Refs(*(next(remaining) if is_present else None for is_present in present)))

    return pl.pallas_call(
        kernel,
        out_shape=[x for x, _ in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=sum(x is not None for x in scalars),
            grid=(num_tiles // block_tiles,),
            in_specs=[spec for x, spec in inputs if x is not None],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[x for x in scratch if x is not None],
        ),
        compiler_params=compiler_params(call.checked, call.vmem_limit_bytes),
        cost_estimate=cost,
        interpret=call.interpret,
        name=name,
    )(*(x for x in (*scalars, *(x for x, _ in inputs)) if x is not None))


def _scratch(shape: KernelShape, kv_dtype: jax.typing.DTypeLike, block_rows: tuple[int, int, int]) -> list[Any]:
    """In the order of Refs; None for what the shape does not have."""
    heads, lanes, page_size = shape.num_kv_heads, shape.layout.value_lanes, shape.page_size
    num_buffers = shape.config.num_buffers
    return [
        pltpu.VMEM((num_buffers, heads, shape.kv_block_tokens, shape.layout.width), kv_dtype),
        pltpu.VMEM((num_buffers, shape.block_pages, 2 * heads, page_size), jnp.float32) if shape.has_scales else None,
        pltpu.VMEM((*block_rows, lanes), jnp.float32),
        pltpu.VMEM((*block_rows, LANES), jnp.float32),
        pltpu.VMEM((*block_rows, LANES), jnp.float32),
        pltpu.SMEM((NUM_PROGRESS,), jnp.int32),
        pltpu.SMEM((shape.table_rows, 1, shape.pages_per_row), jnp.int32),
        pltpu.SMEM((num_buffers,), jnp.int32),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.SemaphoreType.DMA((shape.table_rows,)),
    ]
