"""Writes a step's keys and values into the pages of one layer, in place.

Memory is addressed in tiles of 8 to 32 tokens (by dtype and chip), so a new token is put into the aligned group of tokens
around it: the group is read, changed and written back. Items are WritePlan's; the grid is as long as the step's live items.
Different items never share a group, which makes the pipeline's early reads safe. Scales are kept by page, and neighbouring
items may share a page: its scales then stay in VMEM from one item to the next.

Fusing this into the attention kernel, where the group is in VMEM anyway, would save reading the group and one kernel launch
per layer: for 8 KV heads of 128 in bfloat16, whose groups have 16 tokens, 64 KiB per decoding row against 4 KiB per token of
context read by attention.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.pallas.tpu_layout import kept_in_hbm
from jaxserve.kernels.pallas.tpu_plan import WritePlan


def write_rows(
    pool: jax.Array,
    scales: jax.Array | None,
    rows: jax.Array,
    row_scales: jax.Array | None,
    plan: WritePlan,
    page_offset: jax.typing.ArrayLike,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """rows [T, Hkv, width] of the pool's dtype into pool [P, Hkv, page_size, width]; row_scales float32 [T, 2 * Hkv] into
    scales [P, 2 * Hkv, page_size] (a KV head's key scale, then its value scale). Returns both, the same buffers."""
    _, Hkv, page_size, width = pool.shape
    group, single = plan.group_tokens, plan.single
    assert page_size % group == 0, f"pages of {page_size} tokens are not whole groups of {group}"
    pool, scales = kept_in_hbm(pool, interpret), kept_in_hbm(scales, interpret)
    block = pl.BlockSpec((1, Hkv, group, width), lambda i, at: (at.page[i] + at.offset[0], 0, at.first[i] // group, 0))
    operands = [rows if single else _rows_of_groups(rows, plan), pool]
    in_specs, out_specs, aliases = [_new_block(operands[0], single), block], [block], {_NUM_SCALARS + 1: 0}
    if scales is not None:
        assert row_scales is not None, "a pool with scales needs the rows' scales"
        operands += [row_scales[:, :, None] if single else _scales_of_pages(row_scales, plan, page_size), scales]
        scale_block = pl.BlockSpec((1, 2 * Hkv, page_size), lambda i, at: (at.page[i] + at.offset[0], 0, 0))
        in_specs += [_new_block(operands[2], single), scale_block]
        out_specs += [scale_block]
        aliases[_NUM_SCALARS + 3] = 1
    outputs = pl.pallas_call(
        functools.partial(_kernel, group=group, has_scales=scales is not None),
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in (pool, scales) if x is not None],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=_NUM_SCALARS,
            grid=(plan.num_items,),
            in_specs=[_with_names(spec) for spec in in_specs],
            out_specs=[_with_names(spec) for spec in out_specs],
        ),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=_cost(operands, in_specs, plan),
        interpret=interpret,
        name="write_kv",
    )(plan.page, plan.first, plan.end, plan.token, jnp.asarray(page_offset, jnp.int32).reshape(1), *operands)
    return outputs[0], outputs[1] if scales is not None else None


def _cost(operands: list[jax.Array], in_specs: list[pl.BlockSpec], plan: WritePlan) -> pl.CostEstimate:
    """What XLA schedules other work by. How many items are live is not known here: all are taken to be, as in a full step.
    Each reads its blocks and writes those of the pool and its scales back."""
    read = [math.prod(spec.block_shape) * x.dtype.itemsize for x, spec in zip(operands, in_specs, strict=True)]
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=plan.page.shape[0] * (sum(read) + sum(read[1::2])))


class _Scalars(NamedTuple):
    page: Any  # WritePlan's arrays
    first: Any
    end: Any
    token: Any
    offset: Any  # [1] the layer's first page


_NUM_SCALARS = len(_Scalars._fields)


def _with_names(spec: pl.BlockSpec) -> pl.BlockSpec:
    """The index map gets the scalars as one _Scalars."""
    index_map: Any = spec.index_map
    return pl.BlockSpec(spec.block_shape, lambda i, *scalars: index_map(i, _Scalars(*scalars)))


def _new_block(new: jax.Array, single: bool) -> pl.BlockSpec:
    """An item's new rows or scales: those of its token, or its own."""
    rest = (0,) * (new.ndim - 1)
    return pl.BlockSpec((1, *new.shape[1:]), lambda i, at: (at.token[i] if single else i, *rest))


def _rows_of_groups(rows: jax.Array, plan: WritePlan) -> jax.Array:
    """[max_items, Hkv, group, width]: the new row of each slot of an item's group; anything where there is none."""
    slots = jnp.arange(plan.group_tokens, dtype=jnp.int32) - (plan.first % plan.group_tokens)[:, None]
    return rows[jnp.clip(plan.token[:, None] + slots, 0, rows.shape[0] - 1)].transpose(0, 2, 1, 3)


def _scales_of_pages(row_scales: jax.Array, plan: WritePlan, page_size: int) -> jax.Array:
    """[max_items, 2 * Hkv, page_size]: the new scale of each slot of an item's page; anything where there is none."""
    slots = jnp.arange(page_size, dtype=jnp.int32) - plan.first[:, None]
    return row_scales[jnp.clip(plan.token[:, None] + slots, 0, row_scales.shape[0] - 1)].transpose(0, 2, 1)


def _kernel(*refs: Any, group: int, has_scales: bool) -> None:
    at, (new, old, *refs_left) = _Scalars(*refs[:_NUM_SCALARS]), refs[_NUM_SCALARS:]
    item = pl.program_id(0)
    lo, hi = at.first[item], at.end[item]
    out = refs_left[2] if has_scales else refs_left[0]

    def merge(old_value: jax.Array, new_value: jax.Array, start: jax.Array, axis: int) -> jax.Array:
        slot = start + jax.lax.broadcasted_iota(jnp.int32, old_value.shape, axis)
        # In 32 bits: exact for every dtype, and selecting packed values by an unpacked mask is not supported everywhere.
        changed = new_value.astype(jnp.float32)
        if changed.ndim < old_value.ndim:  # one token: [Hkv, width]
            changed = changed[:, None]
        changed = jnp.broadcast_to(changed, old_value.shape)
        return jnp.where((slot >= lo) & (slot < hi), changed, old_value.astype(jnp.float32)).astype(old_value.dtype)

    out[0] = merge(old[0], new[0], lo // group * group, 1)
    if has_scales:
        new_scales, old_scales, _, out_scales = refs_left
        is_first = (item == 0) | (at.page[jnp.maximum(item - 1, 0)] != at.page[item])
        kept = jnp.where(is_first, old_scales[0], out_scales[0])
        out_scales[0] = merge(kept, new_scales[0], jnp.int32(0), 1)
