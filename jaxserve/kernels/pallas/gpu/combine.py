"""Second half of split-KV attention: the weighted mean of an item's parts. It knows no plan and no layout of parts.

    part n -> warpgroup n // unroll % warpgroups -> its mean, `unroll` loads at a time -> shared memory -> the mean

For kernels without automatic barriers: shared memory is written by one warpgroup, read by another one, and never reused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import softmax


class Mean(NamedTuple):
    """A weighted mean in the making, or a part of one; float32."""

    value: jax.Array  # [D] sum of weights times values
    peak: Any  # base-2 logarithm of the unit of `value` and `total`; -inf for what has no weight
    total: Any  # sum of the weights

    @staticmethod
    def empty(columns: int) -> Mean:
        return Mean(jnp.zeros((columns,), jnp.float32), jnp.float32(softmax.LOWEST), jnp.float32(0))

    def plus(self, parts: Sequence[Mean]) -> Mean:
        """All in one new unit, so that no part's exponential waits for the one before."""
        means = (self, *parts)
        peak = functools.reduce(jnp.maximum, (x.peak for x in means))
        weights = [jnp.exp2(x.peak - peak) for x in means]
        value = functools.reduce(operator.add, (x.value * weight for x, weight in zip(means, weights, strict=True)))
        total = functools.reduce(operator.add, (x.total * weight for x, weight in zip(means, weights, strict=True)))
        return Mean(value, peak, total)

    @property
    def normalized(self) -> jax.Array:
        """[D]; zeros where there was no weight."""
        return self.value * jnp.where(self.total > 0, 1 / self.total, 0.0)

    @property
    def log(self) -> Any:
        """Base-2 logarithm of the sum of the weights; softmax.LOWEST where there was none."""
        return jnp.where(self.total > 0, self.peak + jnp.log2(self.total), softmax.LOWEST)


def scratch(warpgroups: int, columns: int) -> list[Any]:
    """Shared memory for what all but the first warpgroup have: values, (peak, total) pairs, and a barrier."""
    others = warpgroups - 1
    if not others:
        return []
    values, stats = plgpu.SMEM((others, columns), jnp.float32), plgpu.SMEM((2 * others,), jnp.float32)
    return [values, stats, plgpu.Barrier(num_arrivals=others, num_barriers=1)]


def weighted_mean(
    load: Callable[[Any], Mean], count: Any, start: Mean, refs: Sequence[Any], *, warpgroups: int, unroll: int
) -> Mean:
    """Of parts load(0) to load(count - 1), scalar count, and each warpgroup's `start`: complete in the first one, wg = 0.

    `load` is also asked for a few numbers from `count` on, whose peak must be -inf. `refs` are what `scratch` describes.
    """
    wg, per_round = lax.axis_index("wg"), unroll * warpgroups

    def add(step: Any, mean: Mean) -> Mean:
        return mean.plus([load(step * per_round + wg * unroll + i) for i in range(unroll)])

    rounds = lax.div(count - wg * unroll + (per_round - 1), jnp.int32(per_round))
    mean = lax.fori_loop(0, rounds, add, start)
    return mean if warpgroups == 1 else _collect(mean, wg, count > unroll, *refs)


def _collect(mean: Mean, wg: Any, is_shared: Any, values: Any, stats: Any, barrier: Any) -> Mean:
    """What all warpgroups have, in the first one. Where that one had all parts, nobody waits."""

    @pl.when(is_shared & (wg > 0))
    def _hand_over() -> None:
        values.at[wg - 1][...] = mean.value
        stats[2 * (wg - 1)] = mean.peak
        stats[2 * (wg - 1) + 1] = mean.total
        plgpu.barrier_arrive(barrier)  # each thread after its own stores

    def collect(mean: Mean) -> Mean:
        plgpu.barrier_wait(barrier)
        others = range(values.shape[0])
        return mean.plus([Mean(plgpu.load(values.at[i]), stats[2 * i], stats[2 * i + 1]) for i in others])

    return lax.cond(is_shared & (wg == 0), collect, lambda mean: mean, mean)
