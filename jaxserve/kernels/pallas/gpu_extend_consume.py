"""The extend kernel's consumers: each warpgroup takes 64 rows of scores through all KV tiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas import gpu_dequant
from jaxserve.kernels.pallas import gpu_softmax as softmax
from jaxserve.kernels.pallas.gpu_common import LOG2E
from jaxserve.kernels.pallas.gpu_extend_plan import ROWS
from jaxserve.kernels.pallas.gpu_extend_store import store
from jaxserve.kernels.pallas.gpu_extend_tile import Shape, Tile, Work


@dataclasses.dataclass(frozen=True)
class Turns:
    """Two consumers' turns at the tensor cores, by a barrier at which both meet; one consumer has nobody to wait for."""

    barrier: Any | None

    def arrive(self) -> None:
        if self.barrier is not None:
            plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        if self.barrier is not None:
            plgpu.barrier_wait(self.barrier)

    def take(self) -> None:
        self.arrive()
        self.wait()


def consume(s: Shape, wg: Any, work: Work, sinks: Any, out: Any, scratch: dict[str, Any]) -> None:
    """All items of a block, one behind the other."""
    work.for_each(functools.partial(_consume_item, s, wg, work, sinks, out, scratch))
    plgpu.wait_smem_to_gmem(0)


def _consume_item(s: Shape, wg: Any, work: Work, sinks: Any, out: Any, scratch: dict[str, Any], item: Any, done: Any) -> Any:
    """The tile is read three times, by and by: its registers are scarce in the loops."""

    def read() -> Tile:
        return Tile.read(s, work, item, done).for_consumer(s, wg)

    tile = read()
    turns = Turns(scratch.get("schedule"))

    def products(slot: Any, place: Any) -> jax.Array:
        def multiply(acc: Any) -> jax.Array:
            for part, (start, width) in enumerate(s.q_parts):
                keys = scratch["k"].at[slot, :, pl.ds(start, width)]
                plgpu.wgmma(acc, scratch[f"q{part}"].at[place], keys.transpose((1, 0)))
            turns.take()
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, s.block_kv), jnp.float32))

    def step(i: Any, state: softmax.Softmax, *, place: Any, tile: Tile | None) -> softmax.Softmax:
        """`tile` where some keys are masked; the item's last step is such a one."""
        slot = lax.rem(i, s.config.num_stages)
        plgpu.barrier_wait(scratch["k_full"].at[slot])
        raw = products(slot, place)
        plgpu.barrier_arrive(scratch["k_empty"].at[slot])
        if tile is not None:
            pl.when(i == tile.end_step - 1)(lambda: plgpu.barrier_arrive(scratch["q_empty"].at[wg]))
        if s.is_quantized:
            plgpu.barrier_wait(scratch["scales_full"].at[slot])
            raw = gpu_dequant.scale_columns(raw, gpu_dequant.load_scales(scratch["scales"].at[slot, 0]))
        raw = s.scoring.raw(raw)
        if tile is not None:
            raw = jnp.where(_visible(s, tile, tile.kv_tile(s, i) * s.block_kv), raw, -jnp.inf)
        state, weights = softmax.weigh(state, raw, s.scoring.factor)
        if s.is_quantized:
            weights = gpu_dequant.scale_columns(weights, _value_scales(scratch["scales"].at[slot, 1], tile is not None))
        state, weights = lax.optimization_barrier((state, weights.astype(s.dtype)))
        turns.arrive()  # our softmax is done
        plgpu.barrier_wait(scratch["v_full"].at[slot])
        turns.wait()  # the tensor cores are free
        buffer = scratch["p"].at[wg] if s.is_interpreted else None
        acc = softmax.add_values(state.acc, weights, scratch["v"].at[slot], buffer)
        plgpu.barrier_arrive(scratch["v_empty"].at[slot])
        return state._replace(acc=acc)

    pl.when(wg == 1)(turns.take)
    pl.when(tile.has_steps)(lambda: plgpu.barrier_wait(scratch["q_full"].at[wg]))
    state = _first_state(s, tile, sinks)
    step_full = functools.partial(step, place=_place(wg, tile), tile=None)
    state = lax.fori_loop(done, done + tile.num_full, step_full, state)
    tile = read()
    step_masked = functools.partial(step, place=_place(wg, tile), tile=tile)
    state = lax.fori_loop(done + tile.num_full, tile.end_step, step_masked, state)
    pl.when(wg == 0)(turns.arrive)
    share = jnp.where(state.total > 0, 1 / state.total, 0.0)
    result = state.acc * lax.broadcast_in_dim(share, state.acc.shape, [0])
    tile = read()
    store(s, tile, result.astype(s.dtype), out, scratch["chunks"].at[_place(wg, tile)])
    pl.when(wg == 0)(turns.wait)
    return tile.end_step


def _place(wg: Any, tile: Tile) -> Any:
    """`wg`, whose place in buffers is to be computed where `tile` has been read, not kept in registers over the loops."""
    return wg + jnp.minimum(tile.lead, 0)  # adds 0


def _value_scales(scales_smem: Any, is_masked: bool) -> jax.Array:
    """Where keys are masked some may be dead, their scales NaN, which a weight of 0 would not hide."""
    scales = gpu_dequant.load_scales(scales_smem)
    return jnp.where(jnp.abs(scales) < jnp.finfo(jnp.float32).max, scales, 0.0) if is_masked else scales


def _first_state(s: Shape, tile: Tile, sinks: Any) -> softmax.Softmax:
    """A sink is a score that is there from the start, without a value."""
    state = softmax.start(ROWS, s.head_dim_v)
    if sinks is None:
        return state
    by_row = plgpu.Layout.WGMMA.reduce(1)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row)
    peak = state.peak
    for head in range(s.wg_heads):
        peak = jnp.where(row >= head * s.wg_tokens, sinks[tile.first_head + head] * LOG2E, peak)
    return state._replace(peak=peak, total=jnp.ones_like(state.total))


def _visible(s: Shape, tile: Tile, kv_start: Any) -> jax.Array:
    """bool [64, block_kv]: whether a row's query sees a key of the KV tile that begins with key `kv_start`.

    Keys are numbered anew for each tile: differences to the rows' numbers would be kept over the loop, in too many registers.
    """
    token = plgpu.broadcasted_iota(jnp.int32, (ROWS, s.block_kv), 0, layout=plgpu.Layout.WGMMA)
    if s.wg_heads > 1:
        token = token & (s.wg_tokens - 1)
    key, query = softmax.columns(ROWS, s.block_kv) + kv_start, token + tile.position
    visible = key <= query
    if s.sliding_window is not None:
        visible &= key > query - s.sliding_window
    if s.page_size is None:
        visible &= key >= tile.lead
    return visible
