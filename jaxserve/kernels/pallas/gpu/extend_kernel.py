"""The extend kernel put together: shared memory, warpgroups and grid. What each warpgroup does stands in extend_load,
extend_consume and extend_store.

There is one block per SM, which takes items of work one after the other: an item is one tile of the plan and `heads_per_tile`
query heads of one KV head, 64 rows of scores per consumer warpgroup, ordered head by head. One more warpgroup, the producer,
fetches queries, keys and values by TMA, and is at the next item before the consumers are. As in FlashAttention-3 (Shah et al.
2024) two consumers take turns, so that one's softmax, or the end of its item, runs beside the other's products; and beside
its own, as extend_consume says.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import dequant
from jaxserve.kernels.pallas.gpu.common import compiler_params, set_max_registers, transforms
from jaxserve.kernels.pallas.gpu.extend_consume import consume
from jaxserve.kernels.pallas.gpu.extend_load import Contiguous, Pages, produce
from jaxserve.kernels.pallas.gpu.extend_plan import CHUNK_COLUMNS, ROWS
from jaxserve.kernels.pallas.gpu.extend_tile import Shape, Work


def _quantized_scratch(s: Shape) -> dict[str, Any]:
    layout = dequant.raw_transforms(math.gcd(s.head_dim, s.head_dim_v), s.kv_dtype)
    full = plgpu.Barrier(num_arrivals=s.copies, num_barriers=1)
    return {
        "raw_k": plgpu.SMEM((s.block_kv, s.head_dim), s.kv_dtype, transforms=layout),
        "raw_v": plgpu.SMEM((s.block_kv, s.head_dim_v), s.kv_dtype, transforms=layout),
        "raw_k_full": full,
        "raw_v_full": full,
        "scales": plgpu.SMEM((s.config.num_stages, 2, s.block_kv), jnp.float32),
        "scales_full": plgpu.Barrier(num_arrivals=2 * s.copies, num_barriers=s.config.num_stages),
    }


def _scratch(s: Shape) -> dict[str, Any]:
    stages, barriers = s.config.num_stages, functools.partial(plgpu.Barrier, num_barriers=s.config.num_stages)

    def buffer(*shape: int, columns: int | None = None) -> Any:
        return plgpu.SMEM(shape, s.dtype, transforms=transforms(columns or shape[-1], s.dtype))

    # Rows of a chunk may be copied one by one, so its tiles are of one row, swizzled as the output is.
    columns = math.gcd(s.head_dim_v, CHUNK_COLUMNS)
    arrivals = 1 if s.is_quantized else s.copies
    tiling, swizzle = plgpu.TilingTransform((1, columns)), plgpu.SwizzleTransform(columns * jnp.dtype(s.dtype).itemsize)
    chunks, chunk_transforms = (s.consumers, s.num_chunks, ROWS, CHUNK_COLUMNS), (tiling, swizzle) if columns > 16 else ()
    buffers = {
        "k": buffer(stages, s.block_kv, s.head_dim, columns=s.k_columns),
        "v": buffer(stages, s.block_kv, s.head_dim_v),
        "chunks": plgpu.SMEM(chunks, s.dtype, transforms=chunk_transforms),
        "q_full": plgpu.Barrier(num_arrivals=s.wg_heads * len(s.q_parts), num_barriers=s.consumers),
        "q_empty": plgpu.Barrier(num_arrivals=1, num_barriers=s.consumers),
        "k_full": barriers(num_arrivals=arrivals),
        "v_full": barriers(num_arrivals=arrivals),
        "k_empty": barriers(num_arrivals=s.consumers),
        "v_empty": barriers(num_arrivals=s.consumers),
        "tail": plgpu.Barrier(num_arrivals=s.copies, num_barriers=1),
    }
    if s.consumers > 1:
        buffers["turns"] = plgpu.Barrier(num_arrivals=1, num_barriers=s.consumers)
    for part, (_, width) in enumerate(s.q_parts):
        buffers[f"q{part}"] = buffer(s.consumers, ROWS, width)
    if s.is_interpreted:
        buffers["p"] = buffer(s.consumers, ROWS, s.block_kv)
    return buffers | _quantized_scratch(s) if s.is_quantized else buffers


def extend_kernel(s: Shape, num_tokens: int, num_tiles: int, interpret: Any) -> Any:
    """A function of q, the plan's tiles and ends, (pool, page_table, page_offset [1][, scales]) or (keys, values), and
    sinks if there are any. Gives [out], or [out, log_sums], those as rows of scores stand: float32 [items, consumers, ROWS]."""

    shares_registers = s.consumers > 1  # two warpgroups begin with all that a thread can have

    def body(q: Any, tiles: Any, ends: Any, *refs: Any, **scratch: Any) -> None:
        *refs, log_sums = refs if s.has_log_sums else (*refs, None)  # type: ignore[assignment]
        *refs, out = refs  # type: ignore[assignment]
        sinks = refs[-1] if s.has_sinks else None
        kv = refs[:-1] if s.has_sinks else refs
        num_items = ends[ends.shape[0] - 1] * s.head_groups
        wg, work = lax.axis_index("wg"), Work(tiles, num_items, lax.axis_index("sm"), s.config.num_sms)

        @pl.when(wg < s.consumers)
        def _consumer() -> None:
            if shares_registers:
                set_max_registers(s.config.consumer_registers, "increase")
            consume(s, wg if s.consumers > 1 else 0, work, sinks, out, log_sums, scratch)

        @pl.when(wg == s.consumers)
        def _producer() -> None:
            if shares_registers:
                set_max_registers(s.config.producer_registers, "decrease")
            produce(s, work, q, Contiguous(s, *kv) if s.page_size is None else Pages(s, *kv), scratch)

    outs = [jax.ShapeDtypeStruct((num_tokens, s.num_q_heads, s.head_dim_v), s.dtype)]
    if s.has_log_sums:
        outs.append(jax.ShapeDtypeStruct((num_tiles * s.head_groups, s.consumers, ROWS), jnp.float32))
    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=_scratch(s),
        grid=(s.config.num_sms,),
        grid_names=("sm",),
        num_threads=s.consumers + 1,
        thread_name="wg",
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="ragged_extend" if s.page_size is None else "paged_extend",
    )
