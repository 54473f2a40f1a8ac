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
from jaxserve.kernels.pallas.gpu_extend_tile import Shape, Tile


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


def consume(s: Shape, wg: Any, tiles: Any, q: Any, sinks: Any, out: Any, scratch: dict[str, Any]) -> None:
    """`tiles` is read three times, by and by: its registers are scarce in the loops."""
    tile = Tile.read(s, tiles).for_consumer(s, wg)
    _load_queries(s, wg, tile, q, scratch)
    turns = Turns(scratch.get("schedule"))

    def products(slot: Any) -> jax.Array:
        def multiply(acc: Any) -> jax.Array:
            for part, (start, width) in enumerate(s.q_parts):
                keys = scratch["k"].at[slot, :, pl.ds(start, width)]
                plgpu.wgmma(acc, scratch[f"q{part}"].at[wg], keys.transpose((1, 0)))
            turns.take()
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, s.block_kv), jnp.float32))

    def step(i: Any, state: softmax.Softmax, *, tile: Tile | None) -> softmax.Softmax:
        slot = lax.rem(i, s.config.num_stages)
        plgpu.barrier_wait(scratch["k_full"].at[slot])
        raw = products(slot)
        plgpu.barrier_arrive(scratch["k_empty"].at[slot])
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
    state = _first_state(s, tile, sinks)
    state = lax.fori_loop(0, tile.num_full, functools.partial(step, tile=None), state)
    tile = Tile.read(s, tiles).for_consumer(s, wg)
    state = lax.fori_loop(tile.num_full, tile.num_steps, functools.partial(step, tile=tile), state)
    pl.when(wg == 0)(turns.take)
    share = jnp.where(state.total > 0, 1 / state.total, 0.0)
    result = state.acc * lax.broadcast_in_dim(share, state.acc.shape, [0])
    store(s, wg, Tile.read(s, tiles), result.astype(s.dtype), out, scratch)


def _value_scales(scales_smem: Any, is_masked: bool) -> jax.Array:
    """Where keys are masked some may be dead, their scales NaN, which a weight of 0 would not hide."""
    scales = gpu_dequant.load_scales(scales_smem)
    return jnp.where(jnp.abs(scales) < jnp.finfo(jnp.float32).max, scales, 0.0) if is_masked else scales


def _load_queries(s: Shape, wg: Any, tile: Tile, q: Any, scratch: dict[str, Any]) -> None:
    full = scratch["q_full"].at[wg]
    for head in range(s.wg_heads):
        tokens = q.at[pl.ds(tile.first_token, s.wg_tokens), tile.first_head + head]
        for part, (start, width) in enumerate(s.q_parts):
            target = scratch[f"q{part}"].at[wg, pl.ds(head * s.wg_tokens, s.wg_tokens)]
            plgpu.copy_gmem_to_smem(tokens.at[:, pl.ds(start, width)], target, full)
    plgpu.barrier_wait(full)


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
