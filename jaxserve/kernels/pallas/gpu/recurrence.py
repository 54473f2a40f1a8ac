"""Recurrences on Hopper, in kernels of Triton's: of a token per row, or a few, and from chunk to chunk.

A program takes some columns of a head's matrix, which do not depend on the others. In a step of one token per row it has one
row: a state is read once and written once for each token, in place. (XLA would do so two and a half times: it gathers states
first, so that it can write where it has read.) From chunk to chunk it goes through all chunks there are, and keeps the state
where it computes as long as the row stays the same; it is written behind each segment.
Proven by the interpreter and compiled; neither has been timed on a device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxserve.kernels.recurrence_arrays import PreparedChunks, Recurrence
from jaxserve.kernels.state_rows import Chunks, StateRows

_COLUMNS = 32  # of a program: with 128 rows of a matrix, 16 KB in the registers of 4 warps. Chosen by reasoning, not timed
_WARPS = 4


def takes_step(inputs: Recurrence) -> bool:
    """Whether the kernel computes this: Triton's blocks are powers of 2."""
    return _is_block(inputs.q.shape[-1]) and inputs.v.shape[-1] % _COLUMNS == 0


def recurrent_step(
    inputs: Recurrence, lines: jax.Array, rows: StateRows, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `recurrence.recur` where rows have few tokens: lines [lines, G, H, K, V] -> (answers [T, G, H, V], lines)."""
    _, groups, heads, value_dim = inputs.v.shape
    rate = () if inputs.rate is None else (inputs.rate,)
    operands = (rows.sources, rows.targets, rows.is_new.astype(jnp.int32), *inputs[:4], *rate, lines)
    kernel = functools.partial(_step, key_dim=inputs.q.shape[-1], has_rate=bool(rate))
    out, lines = pl.pallas_call(
        kernel,
        grid=(len(rows.targets), groups * heads, value_dim // _COLUMNS),
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
    state, count = jnp.where(is_new[row] > 0, 0.0, state), targets.shape[1]
    for turn in range(count):
        token = row * count + turn
        state = state * jnp.exp(log_decay[token, group, in_group])
        key = triton.load(k.at[token, group, inner])[:, None]
        value = triton.load(v.at[token, group, in_group, column])
        if has_rate:
            value = rates[0][token, group, in_group] * (value - jnp.sum(state * key, axis=0))
        state = state + key * value[None]
        query = triton.load(q.at[token, group, inner])[:, None]
        triton.store(out.at[token, group, in_group, column], jnp.sum(state * query, axis=0))
        target = targets[row, turn]  # where there is no token behind the last line
        is_there = jnp.broadcast_to(target < lines.shape[0], state.shape)
        triton.store(lines.at[(target, *block)], state, mask=is_there)


def takes_chunks(inputs: Recurrence, size: int) -> bool:
    """Whether the kernel computes chunks of `size` tokens."""
    return takes_step(inputs) and _is_block(size)


def _is_block(size: int) -> bool:
    """Of tensor cores at least 16."""
    return size >= 16 and size & (size - 1) == 0


def scan_chunks(
    prepared: PreparedChunks,
    chunks: Chunks,
    lines: jax.Array,
    out: jax.Array,
    *,
    is_exact: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `recurrence.chunks_in_turn`."""
    _, groups, heads, _, value_dim = prepared.values.shape
    reads = () if prepared.reads is None else (prepared.reads,)
    count = chunks.count.reshape(1)
    numbers = (count, chunks.starts, chunks.lengths, chunks.sources, chunks.targets, chunks.is_new.astype(jnp.int32))
    arrays = (prepared.queries, prepared.keys, prepared.values, prepared.scores, prepared.decay, *reads)
    operands = (*numbers, *arrays, lines, out)
    kernel = functools.partial(
        _scan,
        size=chunks.size,
        key_dim=prepared.queries.shape[-1],
        precision=jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.HIGH,
    )
    lines, out = pl.pallas_call(
        kernel,
        grid=(groups * heads, value_dim // _COLUMNS),
        out_shape=(jax.ShapeDtypeStruct(lines.shape, lines.dtype), jax.ShapeDtypeStruct(out.shape, out.dtype)),
        input_output_aliases={len(operands) - 2: 0, len(operands) - 1: 1},
        # What one chunk reads fills half of the shared memory.
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="scan_chunks",
    )(*operands)
    return lines, out


def _scan(
    count: Any, starts: Any, lengths: Any, sources: Any, targets: Any, is_new: Any,
    queries: Any, keys: Any, values: Any, scores: Any, decay: Any, *refs: Any,
    size: int, key_dim: int, precision: jax.lax.Precision,
) -> None:  # fmt: skip
    *reads, _, _, lines, out = refs
    head, part = pl.program_id(0), pl.program_id(1)
    group, in_group = head // values.shape[2], head % values.shape[2]
    token, inner, column = jnp.arange(size), jnp.arange(key_dim), part * _COLUMNS + jnp.arange(_COLUMNS)
    block = (group, in_group, inner[:, None], column[None])

    def of_keys(array: Any, chunk: jax.Array) -> jax.Array:
        return triton.load(array.at[chunk, group, in_group, token[:, None], inner[None]])

    dot = functools.partial(triton.dot, precision=precision)

    def one(chunk: jax.Array, state: jax.Array) -> jax.Array:
        before = jnp.maximum(chunk - 1, 0)
        goes_on = (chunk > 0) & (sources[chunk] == targets[before])
        is_read = jnp.logical_not(goes_on) & (is_new[chunk] == 0)
        read = triton.load(lines.at[(sources[chunk], *block)], mask=jnp.broadcast_to(is_read, state.shape), other=0.0)
        state = jnp.where(goes_on & (is_new[chunk] == 0), state, read)
        added = triton.load(values.at[chunk, group, in_group, token[:, None], column[None]])
        if reads:
            added = added - dot(of_keys(reads[0], chunk), state)
        of_chunk = triton.load(scores.at[chunk, group, in_group, token[:, None], token[None]])
        answers = dot(of_keys(queries, chunk), state) + dot(of_chunk, added)
        is_there = jnp.broadcast_to((token < lengths[chunk])[:, None], answers.shape)
        triton.store(out.at[starts[chunk] + token[:, None], group, in_group, column[None]], answers, mask=is_there)
        state = decay[chunk, group, in_group, 0, 0] * state + dot(of_keys(keys, chunk), added, trans_a=True)
        after = jnp.minimum(chunk + 1, count[0] - 1)
        is_kept = (after == chunk) | (targets[after] != targets[chunk])
        triton.store(lines.at[(targets[chunk], *block)], state, mask=jnp.broadcast_to(is_kept, state.shape))
        return state

    jax.lax.fori_loop(0, count[0], one, jnp.zeros((key_dim, _COLUMNS), jnp.float32))
