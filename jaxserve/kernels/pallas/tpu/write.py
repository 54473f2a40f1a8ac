"""Writes a step's keys and values into the pages of one layer, in place.

Memory is addressed in tiles of 8 to 32 tokens (by dtype), so a new token is put into the aligned group of tokens around it: the
group is read, changed and written back. Items are WritePlan's, as many as the step has live ones. Copying a decode row's group
takes less than a copy's latency, so while one is changed, some of the next items' groups come in and some of the last ones' go
out. Different items never share a group: one's read need not wait for another's write. Scales are kept by page, which
neighbours may share: they change its scales one after the other, between one read and one write.

Fusing this into the attention kernel would save a decode row the read of its group (64 KiB per layer, for 8 KV heads of 128 in
bfloat16 and groups of 16 tokens) where the attention reads 4 KiB per token of context: 3 % at 512 tokens, 0.8 % at 2048.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.pallas.tpu.layout import compiler_params, kept_in_hbm
from jaxserve.kernels.pallas.tpu.plan import WritePlan

_SLOT_BYTES = 4 << 20  # of VMEM, for groups on their way in and out
_MAX_SLOTS = 32


class _Refs(NamedTuple):
    """In the order in which pallas_call hands them over; those of scales are None for a pool without."""

    # Scalars: the arrays of WritePlan.
    num_items: Any  # [1]
    page: Any
    first: Any
    end: Any
    token: Any
    page_offset: Any  # [1]
    # Inputs in HBM.
    new: Any  # [T, Hkv, width] by token if `single`, else [items, Hkv, group, width]
    old_pool: Any  # the buffer of `pool`
    new_scales: Any  # [T or items, 2 * Hkv, page_size]
    old_scales: Any
    # Outputs in HBM.
    pool: Any
    scales: Any
    # Scratch in VMEM, a slot per item on its way: item i's is i % slots; of a step's pages likewise.
    new_slots: Any
    slots: Any
    new_scale_slots: Any
    scale_slots: Any
    # DMA semaphores, one per slot.
    read: Any
    written: Any
    scales_read: Any
    scales_written: Any


_NUM_SCALARS = 6


@dataclasses.dataclass(frozen=True)
class _Shape:
    group: int
    single: bool
    num_slots: int  # a power of two
    has_scales: bool


def write_rows(
    pool: jax.Array,
    scales: jax.Array | None,
    rows: jax.Array,
    row_scales: jax.Array | None,
    plan: WritePlan,
    page_offset: jax.typing.ArrayLike,
    *,
    interpret: Any = False,
    checked: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """rows [T, Hkv, width] of the pool's dtype into pool [P, Hkv, page_size, width]; row_scales float32 [T, 2 * Hkv] into
    scales [P, 2 * Hkv, page_size] (a KV head's key scale, then its value scale). Returns both, the same buffers."""
    _, Hkv, page_size, width = pool.shape
    group = plan.group_tokens
    assert page_size % group == 0, f"pages of {page_size} tokens are not whole groups of {group}"
    new, new_scales = rows if plan.single else _rows_of_groups(rows, plan), None
    if scales is not None:
        assert row_scales is not None, "a pool with scales needs the rows' scales"
        new_scales = _scales_of_pages(row_scales, plan, page_size)
    inputs = [kept_in_hbm(x, interpret) for x in (new, pool, new_scales, scales)]
    scale_block = (2 * Hkv, page_size)
    blocks: list[tuple[int, ...]] = [new.shape[1:], (Hkv, group, width), scale_block, scale_block]
    slot_bytes = [0 if x is None else math.prod(block) * x.dtype.itemsize for x, block in zip(inputs, blocks, strict=True)]
    shape = _Shape(group, plan.single, _num_slots(sum(slot_bytes)), scales is not None)
    slots = [None if x is None else pltpu.VMEM((shape.num_slots, *b), x.dtype) for x, b in zip(inputs, blocks, strict=True)]
    semaphores = pltpu.SemaphoreType.DMA((shape.num_slots,))
    of_scales = semaphores if shape.has_scales else None
    scratch = [*slots, semaphores, semaphores, of_scales, of_scales]
    outputs = inputs[1::2]
    present = [x is not None for x in [*[0] * _NUM_SCALARS, *inputs, *outputs, *scratch]]

    def kernel(*given: Any) -> None:
        remaining = iter(given)
        _write_items(shape, _Refs(*(next(remaining) if is_present else None for is_present in present)))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # Every item is taken to be live, as in a full step. It reads its blocks, and writes those of the pool and its scales back.
    cost = pl.CostEstimate(0, 0, plan.page.shape[0] * (sum(slot_bytes) + sum(slot_bytes[1::2])))
    written = pl.pallas_call(
        kernel,
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in outputs if x is not None],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=_NUM_SCALARS,
            grid=(1,),
            in_specs=[in_hbm for x in inputs if x is not None],
            out_specs=[in_hbm for x in outputs if x is not None],
            scratch_shapes=[x for x in scratch if x is not None],
        ),
        input_output_aliases={_NUM_SCALARS + 1: 0, _NUM_SCALARS + 3: 1} if shape.has_scales else {_NUM_SCALARS + 1: 0},
        compiler_params=compiler_params(checked),
        cost_estimate=cost,
        interpret=interpret,
        name="write_kv",
    )(*_scalars(plan, page_offset), *(x for x in inputs if x is not None))
    return written[0], written[1] if shape.has_scales else None


def _scalars(plan: WritePlan, page_offset: jax.typing.ArrayLike) -> list[jax.Array]:
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    return [plan.num_items.reshape(1), plan.page, plan.first, plan.end, plan.token, offset]


def _num_slots(slot_bytes: int) -> int:
    count = _MAX_SLOTS
    while count > 2 and count * slot_bytes > _SLOT_BYTES:
        count //= 2
    return count


def _rows_of_groups(rows: jax.Array, plan: WritePlan) -> jax.Array:
    """[max_items, Hkv, group, width]: the new row of each slot of an item's group; anything where there is none."""
    slots = jnp.arange(plan.group_tokens, dtype=jnp.int32) - (plan.first % plan.group_tokens)[:, None]
    return rows[jnp.clip(plan.token[:, None] + slots, 0, rows.shape[0] - 1)].transpose(0, 2, 1, 3)


def _scales_of_pages(row_scales: jax.Array, plan: WritePlan, page_size: int) -> jax.Array:
    """The new scale of each slot of a page, anything where there is none: [T, 2 * Hkv, page_size] by token if items have one
    token each, else [max_items, ...]."""
    if plan.single:
        return jnp.broadcast_to(row_scales[:, :, None], (*row_scales.shape, page_size))
    slots = jnp.arange(page_size, dtype=jnp.int32) - plan.first[:, None]
    return row_scales[jnp.clip(plan.token[:, None] + slots, 0, row_scales.shape[0] - 1)].transpose(0, 2, 1)


def _write_items(shape: _Shape, refs: _Refs) -> None:
    num_items, ahead = refs.num_items[0], shape.num_slots // 2

    def start(i: Any, num_pages: Any) -> Any:
        _start_reads(shape, refs, i)
        return _start_scales(shape, refs, i, num_pages) if shape.has_scales else num_pages

    def step(i: Any, num_pages: tuple[Any, Any]) -> tuple[Any, Any]:
        started, changed = num_pages
        started = jax.lax.cond(i + ahead < num_items, lambda: start(i + ahead, started), lambda: started)
        for copy in _reads(shape, refs, i):
            copy.wait()
        if shape.has_scales:
            changed = _change_scales(shape, refs, i, changed)
        slot = i % shape.num_slots
        refs.slots[slot] = _merged(refs, i, refs.slots[slot], refs.new_slots[slot], _group_start(shape, refs, i), axis=1)
        _write(shape, refs, i).start()
        return started, changed

    started = jax.lax.fori_loop(0, jnp.minimum(ahead, num_items), start, jnp.int32(0))
    _, num_pages = jax.lax.fori_loop(0, num_items, step, (started, jnp.int32(0)))
    _for_last(shape, num_items, lambda i: _write(shape, refs, i).wait())
    if shape.has_scales:
        _for_last(shape, num_pages, lambda number: _write_scales(shape, refs, 0, number).wait())


def _for_last(shape: _Shape, count: Any, do: Any) -> None:
    """Those whose writes nobody has waited for, for none came after them in their slots."""
    jax.lax.fori_loop(jnp.maximum(count - shape.num_slots, 0), count, lambda i, _: do(i), None)


def _group_start(shape: _Shape, refs: _Refs, i: Any) -> Any:
    return refs.first[i] // shape.group * shape.group


def _place(shape: _Shape, refs: _Refs, i: Any) -> Any:
    """An item's group in the pool."""
    start = pl.multiple_of(_group_start(shape, refs, i), shape.group)
    return refs.pool.at[refs.page[i] + refs.page_offset[0], :, pl.ds(start, shape.group), :]


def _reads(shape: _Shape, refs: _Refs, i: Any) -> list[Any]:
    slot, row = i % shape.num_slots, refs.token[i] if shape.single else i
    copies = [(_place(shape, refs, i), refs.slots), (refs.new.at[row], refs.new_slots)]
    if shape.has_scales:
        copies.append((refs.new_scales.at[row], refs.new_scale_slots))
    return [pltpu.make_async_copy(source, target.at[slot], refs.read.at[slot]) for source, target in copies]


def _write(shape: _Shape, refs: _Refs, i: Any) -> Any:
    slot = i % shape.num_slots
    return pltpu.make_async_copy(refs.slots.at[slot], _place(shape, refs, i), refs.written.at[slot])


def _start_reads(shape: _Shape, refs: _Refs, i: Any) -> None:
    pl.when(i >= shape.num_slots)(lambda: _write(shape, refs, i - shape.num_slots).wait())
    for copy in _reads(shape, refs, i):
        copy.start()


def _read_scales(shape: _Shape, refs: _Refs, i: Any, number: Any) -> Any:
    """Of the page of item i, which is the step's page `number`."""
    slot = number % shape.num_slots
    page = refs.scales.at[refs.page[i] + refs.page_offset[0]]
    return pltpu.make_async_copy(page, refs.scale_slots.at[slot], refs.scales_read.at[slot])


def _write_scales(shape: _Shape, refs: _Refs, i: Any, number: Any) -> Any:
    slot = number % shape.num_slots
    page = refs.scales.at[refs.page[i] + refs.page_offset[0]]
    return pltpu.make_async_copy(refs.scale_slots.at[slot], page, refs.scales_written.at[slot])


def _is_first_of_page(refs: _Refs, i: Any) -> Any:
    return (i == 0) | (refs.page[jnp.maximum(i - 1, 0)] != refs.page[i])


def _start_scales(shape: _Shape, refs: _Refs, i: Any, num_pages: Any) -> Any:
    """If item i begins a page: its read, after the write that had its slot. How many pages have begun by then."""
    is_first = _is_first_of_page(refs, i)

    @pl.when(is_first)
    def _() -> None:
        pl.when(num_pages >= shape.num_slots)(lambda: _write_scales(shape, refs, i, num_pages).wait())
        _read_scales(shape, refs, i, num_pages).start()

    return jnp.where(is_first, num_pages + 1, num_pages)


def _change_scales(shape: _Shape, refs: _Refs, i: Any, num_pages: Any) -> Any:
    """With the scales of item i; writes them if no later item changes them. How many pages have begun by then."""
    is_first = _is_first_of_page(refs, i)
    number = jnp.where(is_first, num_pages, num_pages - 1)
    pl.when(is_first)(lambda: _read_scales(shape, refs, i, number).wait())
    slot = number % shape.num_slots
    new = refs.new_scale_slots[i % shape.num_slots]
    refs.scale_slots[slot] = _merged(refs, i, refs.scale_slots[slot], new, jnp.int32(0), axis=1)
    num_items = refs.num_items[0]
    is_last = (i + 1 == num_items) | (refs.page[jnp.minimum(i + 1, num_items - 1)] != refs.page[i])
    pl.when(is_last)(lambda: _write_scales(shape, refs, i, number).start())
    return number + 1


def _merged(refs: _Refs, i: Any, old: jax.Array, new: jax.Array, start: Any, axis: int) -> jax.Array:
    """`old`, whose slots along `axis` begin with `start`, with item i's slots from `new`.

    In 32 bits: exact for every dtype, and selecting packed values by an unpacked mask is not supported everywhere.
    """
    slot = start + jax.lax.broadcasted_iota(jnp.int32, old.shape, axis)
    changed = new.astype(jnp.float32)
    if changed.ndim < old.ndim:  # one token: [Hkv, width]
        changed = changed[:, None]
    is_new = (slot >= refs.first[i]) & (slot < refs.end[i])
    return jnp.where(is_new, jnp.broadcast_to(changed, old.shape), old.astype(jnp.float32)).astype(old.dtype)
