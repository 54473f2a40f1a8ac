"""A recurrence's step of one token per row on Hopper, in one kernel of Triton's: states are read and written once, in place.

A program takes some columns of one row's and one head's matrix, which do not depend on the others. XLA would read and write
states two and a half times as often: it gathers them first, so that it can write where it has read.
Proven by the interpreter and compiled; it has not been timed on a device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxserve.kernels.recurrence import Recurrence
from jaxserve.kernels.state_rows import StateRows

_COLUMNS = 32  # of a program: with 128 rows of a matrix, 16 KB in the registers of 4 warps. Chosen by reasoning, not timed
_WARPS = 4


def takes_step(inputs: Recurrence) -> bool:
    """Whether the kernel computes this: Triton's blocks are powers of 2."""
    key_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    return key_dim & (key_dim - 1) == 0 and key_dim >= 16 and value_dim % _COLUMNS == 0


def recurrent_step(
    inputs: Recurrence, lines: jax.Array, rows: StateRows, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `recurrence.recur` where rows have one token each: lines [lines, G, H, K, V] -> (answers [R, G, H, V], lines)."""
    num_rows, groups, heads, value_dim = inputs.v.shape
    rate = () if inputs.rate is None else (inputs.rate,)
    operands = (rows.sources, rows.targets[:, 0], rows.is_new.astype(jnp.int32), *inputs[:4], *rate, lines)
    kernel = functools.partial(_step, key_dim=inputs.q.shape[-1], has_rate=bool(rate))
    out, lines = pl.pallas_call(
        kernel,
        grid=(num_rows, groups * heads, value_dim // _COLUMNS),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.v.shape, jnp.float32),
            jax.ShapeDtypeStruct(lines.shape, lines.dtype),
        ),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="recurrent_step",
    )(*operands)
    return out, lines


def _step(
    sources: Any, targets: Any, is_new: Any, q: Any, k: Any, v: Any, log_decay: Any, *refs: Any, key_dim: int, has_rate: bool
) -> None:
    *rates, _, out, lines = refs
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, in_group = head // v.shape[2], head % v.shape[2]
    inner, column = jnp.arange(key_dim), part * _COLUMNS + jnp.arange(_COLUMNS)
    block = (group, in_group, inner[:, None], column[None])
    state = triton.load(lines.at[(sources[row], *block)])
    state = jnp.where(is_new[row] > 0, 0.0, state) * jnp.exp(log_decay[row, group, in_group])
    key = triton.load(k.at[row, group, inner])[:, None]
    value = triton.load(v.at[row, group, in_group, column])
    if has_rate:
        value = rates[0][row, group, in_group] * (value - jnp.sum(state * key, axis=0))
    state = state + key * value[None]
    query = triton.load(q.at[row, group, inner])[:, None]
    triton.store(out.at[row, group, in_group, column], jnp.sum(state * query, axis=0))
    target = targets[row]  # of a padding row behind the last line
    is_there = jnp.broadcast_to(target < lines.shape[0], state.shape)
    triton.store(lines.at[(target, *block)], state, mask=is_there)
