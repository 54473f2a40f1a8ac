"""MLA decode's second kernel: rows that several workers had a part of, and rows without a token."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu.combine import Mean, weighted_mean
from jaxserve.kernels.pallas.gpu.combine import scratch as combine_scratch
from jaxserve.kernels.pallas.gpu.common import compiler_params
from jaxserve.kernels.pallas.gpu.mla_plan import LATENT, Row, Shape


def combine_kernel(s: Shape, interpret: Any) -> Any:
    """Writes in place which of the plan's `combined` rows are empty (zeros) or have several parts: a block per query row.
    (plan rows, combined, parts, part_logs, out), and behind them logs if there are any, as `attend_kernel` has them."""
    warpgroups = s.config.combine_threads(s.num_combined, s.num_workers)

    def body(plan_rows: Any, combined: Any, parts: Any, part_logs: Any, out: Any, *others: Any) -> None:
        logs, scratch = others[: s.has_log_sums], others[s.has_log_sums :]
        index, block, query = (lax.axis_index(name) for name in ("index", "block", "query"))
        about, wg = Row.read(plan_rows, combined[index]), lax.axis_index("wg")

        def load(number: Any) -> Mean:
            part = jnp.minimum(number, about.num_parts - 1)
            slot = jnp.where(part == 0, about.first_slot, 2 * (about.first_worker + part))
            value = sum(plgpu.load(parts.at[i, slot, block, query]).astype(jnp.float32) for i in range(2))
            log = jnp.where(number < about.num_parts, part_logs[slot, block, query], -jnp.inf)
            return Mean(value, log, jnp.float32(1))

        @pl.when(about.num_parts != 1)
        def _combine() -> None:
            start, unroll = Mean.empty(LATENT), s.config.combine_unroll
            mean = weighted_mean(load, about.num_parts, start, scratch, warpgroups=warpgroups, unroll=unroll)

            @pl.when(wg == 0)
            def _write() -> None:
                out.at[about.row, block, query][...] = mean.normalized.astype(s.dtype)
                for log in logs:
                    log[about.row, block, query] = mean.log

    return plgpu.kernel(
        body,
        out_type=(),
        scratch_types=combine_scratch(warpgroups, LATENT),
        grid=(s.num_combined, s.blocks, s.m),
        grid_names=("index", "block", "query"),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=compiler_params(auto_barriers=False),  # shared memory is written once: see combine
        interpret=interpret,
        kernel_name="mla_decode_combine",
    )
