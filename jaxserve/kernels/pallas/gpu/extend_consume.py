"""The extend kernel's consumers: each warpgroup takes 64 rows of scores through all KV tiles.

As in FlashAttention-3 (Shah et al. 2024, section 3.2) a step starts the products of a tile's scores and of the weighted values
of the tile before, and makes weights of the scores while the values are multiplied:

    scores(0), weights(0) | scores(i), values(i - 1), weights(i) | ... | values(last)

Weights stay in registers. ptxas lets the products run on only if nothing writes the registers of their operands meanwhile
(C7513): weights become the operand, of the products' type, after the wait for the values that the ones before them weigh.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import dequant, softmax
from jaxserve.kernels.pallas.gpu.common import LOG2E
from jaxserve.kernels.pallas.gpu.extend_plan import ROWS
from jaxserve.kernels.pallas.gpu.extend_store import store
from jaxserve.kernels.pallas.gpu.extend_tile import Shape, Tile, Work


@dataclasses.dataclass(frozen=True)
class Turns:
    """Two consumers' turns at the tensor cores: each has a barrier at which the other arrives. One alone waits for nobody."""

    barriers: Any | None
    wg: Any

    def wait(self) -> None:
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.wg])

    def pass_on(self) -> None:
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[1 - self.wg])


class Carry(NamedTuple):
    """Between steps: a tile's weights, and the state that is scaled for them but lacks that tile's values."""

    state: softmax.Softmax
    weights: jax.Array  # [64, block_kv], of the products' type


def consume(s: Shape, wg: Any, work: Work, sinks: Any, out: Any, log_sums: Any | None, scratch: dict[str, Any]) -> None:
    """All items of a block, one behind the other."""
    turns = Turns(scratch.get("turns"), wg)
    pl.when(wg == 1)(turns.pass_on)  # the other begins
    work.for_each(functools.partial(_consume_item, _Consumer(s, wg, turns, scratch), work, sinks, out, log_sums))
    pl.when(wg == 0)(turns.wait)  # for the turn that nobody takes
    plgpu.wait_smem_to_gmem(0)


def _consume_item(consumer: _Consumer, work: Work, sinks: Any, out: Any, log_sums: Any | None, item: Any, done: Any) -> Any:
    """The tile is read three times, by and by: its registers are scarce in the loops."""
    s, wg, scratch = consumer.s, consumer.wg, consumer.scratch

    def read() -> Tile:
        return Tile.read(s, work, item, done).for_consumer(s, wg)

    tile = read()
    state = _first_state(s, tile, sinks)
    nothing = Carry(state, plgpu.layout_cast(jnp.zeros((ROWS, s.block_kv), s.dtype), plgpu.Layout.WGMMA))
    carry = lax.cond(tile.has_steps, lambda: consumer.first(tile, state), lambda: nothing)
    carry = lax.fori_loop(done + 1, done + tile.num_full, functools.partial(consumer.step, tile), carry)
    tile = read()
    masked = done + jnp.maximum(tile.num_full, 1)
    carry = lax.fori_loop(masked, tile.end_step, functools.partial(consumer.masked_step, tile), carry)
    state = lax.cond(tile.has_steps, lambda: consumer.add_values(tile.end_step - 1, carry), lambda: carry.state)
    share = jnp.where(state.total > 0, 1 / state.total, 0.0)
    result = state.acc * lax.broadcast_in_dim(share, state.acc.shape, [0])
    tile = read()
    if log_sums is not None:
        log_sums.at[item, _place(wg, tile)][...] = softmax.log_sum(state)
    store(s, tile, result.astype(s.dtype), out, scratch["chunks"].at[_place(wg, tile)])
    return tile.end_step


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """The steps of one warpgroup. They are counted on from item to item; `tile` is the item."""

    s: Shape
    wg: Any
    turns: Turns
    scratch: dict[str, Any]

    def first(self, tile: Tile, state: softmax.Softmax) -> Carry:
        """Weights of an item's first tile. Its keys are masked, whether they need it or not."""
        plgpu.barrier_wait(self.scratch["q_full"].at[self.wg])
        self._wait_for_keys(tile.first_step)
        carry = self._masked(tile, tile.first_step, state)
        return carry._replace(state=carry.state._replace(acc=state.acc))  # zeros, however they are scaled

    def step(self, tile: Tile, i: Any, carry: Carry) -> Carry:
        """Weights of a tile that all queries see whole, and the values of the one before. It is never an item's last."""
        s, state = self.s, carry.state
        slot = self._slot(i - 1)
        plgpu.barrier_wait(self.scratch["v_full"].at[slot])
        self.turns.wait()

        def multiply(scores: Any, values: Any) -> tuple[jax.Array, softmax.Weighed, jax.Array]:
            self._start_scores(tile, i, scores)
            softmax.start_values(values, state.acc, carry.weights, self.scratch["v"].at[slot], self._p_smem())
            self.turns.pass_on()
            raw = self._scaled(i, plgpu.wgmma_accumulator_load(scores, wait_n=1))
            weighed = softmax.weigh_rows(state.peak, raw, s.scoring.factor)
            total = weighed.total(state.total)
            weighed = weighed._replace(weights=self._weights_for_values(i, weighed.weights))
            weighed, total = lax.optimization_barrier((weighed, total))
            self._wait_for_keys(i + 1)  # here, where ptxas does not move the softmax behind it and the wait for the values
            return softmax.finished_values(values, state.acc, self._p_smem()), weighed, total

        accumulators = (plgpu.ACC((ROWS, columns), jnp.float32) for columns in (s.block_kv, s.head_dim_v))
        acc, weighed, total = pl.run_scoped(multiply, *accumulators)
        plgpu.barrier_arrive(self.scratch["v_empty"].at[slot])
        acc = acc * lax.broadcast_in_dim(weighed.shrink, acc.shape, [0])
        return Carry(softmax.Softmax(acc, weighed.peak, total), weighed.weights.astype(s.dtype))

    def masked_step(self, tile: Tile, i: Any, carry: Carry) -> Carry:
        """The same where masks are needed, one behind the other: for masks beside all operands registers do not suffice."""
        return self._masked(tile, i, self.add_values(i - 1, carry))

    def add_values(self, i: Any, carry: Carry) -> softmax.Softmax:
        """The values of a tile that has been weighed."""
        slot = self._slot(i)
        plgpu.barrier_wait(self.scratch["v_full"].at[slot])
        acc = softmax.add_values(carry.state.acc, carry.weights, self.scratch["v"].at[slot], self._p_smem())
        plgpu.barrier_arrive(self.scratch["v_empty"].at[slot])
        return carry.state._replace(acc=acc)

    def _masked(self, tile: Tile, i: Any, state: softmax.Softmax) -> Carry:
        s = self.s
        self.turns.wait()

        def multiply(scores: Any) -> jax.Array:
            self._start_scores(tile, i, scores)
            self.turns.pass_on()
            return scores[...]

        raw = self._scaled(i, pl.run_scoped(multiply, plgpu.ACC((ROWS, s.block_kv), jnp.float32)))
        pl.when(i == tile.end_step - 1)(lambda: plgpu.barrier_arrive(self.scratch["q_empty"].at[self.wg]))
        raw = jnp.where(_visible(s, tile, tile.kv_tile(s, i) * s.block_kv), raw, -jnp.inf)
        state, weights = softmax.weigh(state, raw, s.scoring.factor)
        pl.when(i + 1 < tile.end_step)(lambda: self._wait_for_keys(i + 1))  # before the values' scales take registers, too
        return Carry(state, self._weights_for_values(i, weights, is_masked=True).astype(s.dtype))

    def _start_scores(self, tile: Tile, i: Any, scores: Any) -> None:
        place = _place(self.wg, tile)
        for part, (start, width) in enumerate(self.s.q_parts):
            keys = self.scratch["k"].at[self._slot(i), :, pl.ds(start, width)]
            plgpu.wgmma(scores, self.scratch[f"q{part}"].at[place], keys.transpose((1, 0)))

    def _scaled(self, i: Any, raw: jax.Array) -> jax.Array:
        """Takes finished scores, for which the keys have been read."""
        slot = self._slot(i)
        plgpu.barrier_arrive(self.scratch["k_empty"].at[slot])
        if self.s.is_quantized:
            plgpu.barrier_wait(self.scratch["scales_full"].at[slot])
            raw = dequant.scale_columns(raw, dequant.load_scales(self.scratch["scales"].at[slot, 0]))
        return self.s.scoring.raw(raw)

    def _weights_for_values(self, i: Any, weights: jax.Array, *, is_masked: bool = False) -> jax.Array:
        """As values are to be multiplied with them, which lack their scales."""
        if not self.s.is_quantized:
            return weights
        return dequant.scale_columns(weights, _value_scales(self.scratch["scales"].at[self._slot(i), 1], is_masked))

    def _slot(self, step: Any) -> Any:
        return lax.rem(step, self.s.config.num_stages)

    def _wait_for_keys(self, step: Any) -> None:
        plgpu.barrier_wait(self.scratch["k_full"].at[self._slot(step)])

    def _p_smem(self) -> Any | None:
        return self.scratch["p"].at[self.wg] if self.s.is_interpreted else None


def _place(wg: Any, tile: Tile) -> Any:
    """`wg`, whose place in buffers is to be computed where `tile` has been read, not kept in registers over the loops."""
    return wg + jnp.minimum(tile.lead, 0)  # adds 0


def _value_scales(scales_smem: Any, is_masked: bool) -> jax.Array:
    """Where keys are masked some may be dead, their scales NaN, which a weight of 0 would not hide."""
    scales = dequant.load_scales(scales_smem)
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
    token = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    if s.wg_heads > 1:
        token = token & (s.wg_tokens - 1)
    key = softmax.columns(ROWS, s.block_kv) + kv_start
    position = token + tile.position
    visible = key <= lax.broadcast_in_dim(jnp.minimum(position, tile.kv_len - 1), key.shape, [0])
    if s.sliding_window is not None:
        visible &= key > lax.broadcast_in_dim(position, key.shape, [0]) - s.sliding_window
    if s.page_size is None:
        visible &= key >= tile.lead
    return visible
