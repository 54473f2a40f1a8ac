"""Puts what the decode pass of a mixed step made in its places among what the extend pass made, in place.

XLA would gather the decode pass' tokens into an array of the step's size, transpose that and select between it and the extend
pass' result: several times the bytes of the result. Here only the decode rows' tokens are moved, by copies from HBM to HBM.
For that a token of one KV head must be whole words and tiles of memory, one after the other (`tokens_are_whole_tiles`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.pallas.tpu.layout import LANES, SUBLANES, compiler_params, kept_in_hbm
from jaxserve.kernels.pallas.tpu.plan import TpuPlan


def tokens_are_whole_tiles(group: int, lanes: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether [..., tile_tokens * group, lanes] lies in memory as [..., tile_tokens, group, lanes] does, so that a view of a
    token costs nothing and a copy may begin and end with one."""
    words = group * jnp.dtype(dtype).itemsize // 4
    is_power_of_two = group & (group - 1) == 0
    return words > 0 and is_power_of_two and (lanes == LANES or group % SUBLANES == 0)


def merge_decoded(
    extended: jax.Array, decoded: jax.Array, plan: TpuPlan, *, interpret: Any = False, checked: bool = False
) -> jax.Array:
    """extended [Hkv, T', G, lanes] by the step's tokens, decoded [Hkv, R * n, G, lanes] by those of the decode pass ->
    `extended`, the same buffer, with the tokens of decode rows from `decoded`."""
    assert plan.decode is not None and plan.decode_tokens is not None, "a mixed step's plan knows the decode rows' tokens"
    rows = plan.decode
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scalars = (rows.block_items[-1:], rows.item_row, rows.q_len, plan.decode_tokens)
    return pl.pallas_call(
        _merge,
        out_shape=pltpu.HBM(extended.shape, extended.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=compiler_params(checked),
        cost_estimate=pl.CostEstimate(0, 0, 2 * decoded.size * decoded.dtype.itemsize),
        interpret=interpret,
        name="paged_merge",
    )(*scalars, kept_in_hbm(decoded, interpret), kept_in_hbm(extended, interpret))


def _merge(
    num_items: Any, item_row: Any, q_len: Any, decode_tokens: Any, decoded: Any, _: Any, merged: Any, copied: Any
) -> None:
    """Starts the copies of all tokens, then waits for as many."""
    row_tokens = decode_tokens.shape[0] // q_len.shape[0]

    def for_each_token(do: Any) -> None:
        def row_of_item(item: Any, _: None) -> None:
            row = item_row[item]
            jax.lax.fori_loop(0, q_len[row], lambda i, _: do(row * row_tokens + i), None)

        jax.lax.fori_loop(0, num_items[0], row_of_item, None)

    def copy(token: Any) -> Any:
        return pltpu.make_async_copy(decoded.at[:, token], merged.at[:, decode_tokens[token]], copied)

    for_each_token(lambda token: copy(token).start())
    for_each_token(lambda token: copy(token).wait())
