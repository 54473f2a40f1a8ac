"""MLA decode's second kernel: rows that several workers had a part of, and rows without a token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas import gpu_softmax
from jaxserve.kernels.pallas.gpu_common import compiler_params
from jaxserve.kernels.pallas.gpu_mla_plan import LATENT, Row, Shape


def combine_kernel(s: Shape, interpret: Any) -> Any:
    """Writes in place those rows of out that are empty (zeros) or have several parts: a thread block per query row."""
    threads = s.config.combine_threads(s.num_rows, s.num_workers)
    unroll = s.config.combine_unroll

    def body(plan_rows: Any, parts: Any, part_logs: Any, out: Any, *scratch: Any) -> None:
        line, block, query = (lax.axis_index(name) for name in ("line", "block", "query"))
        about, wg = Row.read(plan_rows, line), lax.axis_index("wg")

        def load(number: Any) -> tuple[Any, Any]:
            """A part's value [LATENT] and logarithm; behind the last part the last one without weight."""
            part = jnp.minimum(number, about.num_parts - 1)
            slot = jnp.where(part == 0, about.first_slot, 2 * (about.first_worker + part))
            value = sum(plgpu.load(parts.at[i, slot, block, query]).astype(jnp.float32) for i in range(2))
            log = jnp.where(number < about.num_parts, part_logs[slot, block, query], -jnp.inf)
            return value, log

        def add(step: Any, state: _Mean) -> _Mean:
            loaded = [load((step * unroll + i) * threads + wg) for i in range(unroll)]
            for value, log in loaded:
                state = state.add(value, log, jnp.float32(1))
            return state

        @pl.when(about.num_parts != 1)
        def _combine() -> None:
            steps = lax.div(about.num_parts + (unroll * threads - 1), unroll * threads)
            state = lax.fori_loop(0, steps, add, _Mean.empty())
            if threads > 1:
                state = _exchange(state, wg, *scratch)

            @pl.when(wg == 0)
            def _write() -> None:
                inverse = jnp.where(state.total > 0, 1 / state.total, 0.0)
                out.at[about.row, block, query][...] = (state.value * inverse).astype(s.dtype)

    scratch = [
        plgpu.SMEM((threads, LATENT), jnp.float32),
        plgpu.SMEM((2 * threads,), jnp.float32),
        plgpu.Barrier(num_arrivals=threads, num_barriers=1),
    ]
    return plgpu.kernel(
        body,
        out_type=(),
        scratch_types=scratch if threads > 1 else [],
        grid=(s.num_rows, s.blocks, s.m),
        grid_names=("line", "block", "query"),
        num_threads=threads,
        thread_name="wg",
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="mla_decode_combine",
    )


class _Mean(NamedTuple):
    """A weighted mean in the making, float32."""

    value: jax.Array  # [LATENT]
    peak: Any  # base-2 logarithm of the unit of `value` and `total`
    total: Any

    @staticmethod
    def empty() -> _Mean:
        return _Mean(jnp.zeros((LATENT,), jnp.float32), jnp.float32(gpu_softmax.LOWEST), jnp.float32(0))

    def add(self, value: Any, log: Any, total: Any) -> _Mean:
        peak = jnp.maximum(self.peak, log)
        keep, weight = jnp.exp2(self.peak - peak), jnp.exp2(log - peak)
        return _Mean(self.value * keep + value * weight, peak, self.total * keep + total * weight)


def _exchange(state: _Mean, wg: Any, values: Any, stats: Any, barrier: Any) -> _Mean:
    """Adds up what the warpgroups have; the result is the first one's."""
    threads = values.shape[0]
    values.at[wg][...] = state.value
    stats[2 * wg] = state.peak
    stats[2 * wg + 1] = state.total
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    state = _Mean.empty()
    for i in range(threads):
        state = state.add(plgpu.load(values.at[i]), stats[2 * i], stats[2 * i + 1])
    return state
