"""Online softmax on wgmma values: one warpgroup's M = 64 query rows against one tile of keys and values.

Scores live in base 2: a row's `peak` is its largest score times log2(e), so that a weight is one FMA and one exp2. Peaks
start at a finite LOWEST, not -inf: a row that has seen nothing visible keeps weight 0 and sum 0 without a NaN.

The hardware takes P from registers and accumulates in place; the interpreter can do neither, so there P goes through a
buffer in shared memory (`p_smem`) and the product is added. Nothing else differs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu.common import LOG2E, ROW_GROUP, value_transforms

LOWEST = -1e30


class Softmax(NamedTuple):
    """What a warpgroup carries from tile to tile, float32."""

    acc: jax.Array  # [M, Dv] weighted values, not yet divided by `total`
    peak: jax.Array  # [M] largest score so far, base 2
    total: jax.Array  # [M] sum of the weights


class Weighed(NamedTuple):
    """What rows make of one more tile, float32."""

    peak: jax.Array  # [M] the largest score so far, base 2
    shrink: jax.Array  # [M] what weights and weighted values before this tile are to be multiplied with
    weights: jax.Array  # [M, N] of this tile

    def total(self, before: jax.Array) -> jax.Array:
        """[M] the sum of the weights, this tile's added."""
        return before * self.shrink + self.weights.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """From a query-key product to a score: times `scale`, then soft_cap * tanh(. / soft_cap)."""

    scale: Any  # a number, or float32 [M] with one for each row
    soft_cap: float | None = None

    @property
    def factor(self) -> Any:
        """What `raw` still has to be multiplied with to be a score in base 2."""
        return (self.scale if self.soft_cap is None else self.soft_cap) * LOG2E

    def raw(self, products: jax.Array) -> jax.Array:
        """Products, bounded where there is a soft cap."""
        return products if self.soft_cap is None else jnp.tanh(products * _by_row(self.scale / self.soft_cap, products))


def _by_row(x: Any, like: jax.Array) -> Any:
    """A number, or [M] as [M, N]."""
    return lax.broadcast_in_dim(x, like.shape, [0]) if isinstance(x, jax.Array) else x


def start(rows: int, head_dim_v: int) -> Softmax:
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return Softmax(
        plgpu.layout_cast(jnp.zeros((rows, head_dim_v), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), by_row),
    )


def products(q_smem: Any, k_smem: Any) -> jax.Array:
    """q [M, Dk] times k [N, Dk] transposed, both in shared memory: float32 [M, N], finished."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((q_smem.shape[0], k_smem.shape[0]), jnp.float32))


def weigh_rows(peak: jax.Array, raw: jax.Array, factor: Any, offset: jax.Array | None = None) -> Weighed:
    """Takes a tile's raw scores [M, N] in (-inf where masked), after rows of `peak` [M].

    `factor` is a number or [M]. With `offset` [M] a peak is the largest score + offset instead.
    """
    highest = raw.max(axis=1) * factor
    new_peak = jnp.maximum(peak, highest if offset is None else highest + offset)
    shrink = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(raw * _by_row(factor, raw) - lax.broadcast_in_dim(new_peak, raw.shape, [0]))
    return Weighed(new_peak, shrink, weights)


def weigh(state: Softmax, raw: jax.Array, factor: Any, offset: jax.Array | None = None) -> tuple[Softmax, jax.Array]:
    """The same: the state rescaled to its new peaks, and the weights [M, N]."""
    weighed = weigh_rows(state.peak, raw, factor, offset)
    acc = state.acc * lax.broadcast_in_dim(weighed.shrink, state.acc.shape, [0])
    return Softmax(acc, weighed.peak, weighed.total(state.total)), weighed.weights


def add_values(acc: jax.Array, weights: jax.Array, v_smem: Any, p_smem: Any | None) -> jax.Array:
    """acc [M, Dv] + weights [M, N] @ v [N, Dv], finished. `p_smem` [M, N] is the interpreter's way; None on hardware."""
    p = weights.astype(v_smem.dtype)
    if p_smem is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_smem))(plgpu.ACC.init(acc))

    def multiply(ref: Any) -> jax.Array:
        start_values(ref, acc, p, v_smem, p_smem)
        return finished_values(ref, acc, p_smem)

    return pl.run_scoped(multiply, plgpu.ACC(acc.shape, jnp.float32))


def start_values(ref: Any, acc: jax.Array, p: jax.Array, v_smem: Any, p_smem: Any | None) -> None:
    """Starts the same with an accumulator of its own, `ref` [M, Dv]; p [M, N] are weights of v's type."""
    if p_smem is None:
        ref[...] = acc
        plgpu.wgmma(ref, p, v_smem)
    else:
        p_smem[...] = p
        plgpu.commit_smem()
        plgpu.wgmma(ref, p_smem, v_smem)


def finished_values(ref: Any, acc: jax.Array, p_smem: Any | None) -> jax.Array:
    """What start_values has started, once all of the warpgroup's products are done."""
    return ref[...] if p_smem is None else acc + ref[...]


def log_sum(state: Softmax) -> jax.Array:
    """[M] natural logarithm of the sum of exponentials of all scores so far; LOWEST where there was none."""
    return jnp.where(state.total > 0, state.peak / LOG2E + jnp.log(state.total), LOWEST)


def columns(rows: int, count: int) -> jax.Array:
    """int32 [rows, count] in wgmma's layout: each element's column."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, count), 1, layout=plgpu.Layout.WGMMA)


def clear_rows(v_smem: Any, end: Any, begin: Any | None = None) -> None:
    """Zeros in v [N, Dv] outside rows begin to end - 1: a weight of 0 does not undo a NaN. For one warpgroup, before its wgmma.

    Also what that warpgroup has written to shared memory before may be overwritten by TMA once this returns.
    """
    columns, dtype = v_smem.shape[1], v_smem.dtype
    tiling, swizzle = value_transforms(v_smem.shape[0], columns, dtype)
    rows = 4 * ROW_GROUP // math.gcd(columns // tiling.tiling[1], 4)  # at a time, to hold few registers
    layout = plgpu.Layout.SMEM_GMEM_COPY((rows, columns), dtype, swizzle.swizzle)

    def clear(piece: Any, _: None) -> None:
        part = v_smem.at[pl.ds(piece * rows, rows)]
        row = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0, layout=layout) + piece * rows
        value = plgpu.load(part, layout=layout)
        is_live = row < end
        if begin is not None:
            is_live &= row >= begin
        part[...] = jnp.where(is_live, value, jnp.zeros_like(value))

    first = jnp.maximum(lax.div(end, jnp.int32(rows)), 0)
    if begin is not None:
        first = jnp.where(begin > 0, 0, first)
    lax.fori_loop(first, v_smem.shape[0] // rows, clear, None)
    plgpu.commit_smem()
