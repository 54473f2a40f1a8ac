"""What layers with states compute: a short causal convolution, and a linear recurrence whose state is a matrix per head.

The recurrence, of one head, with the token's key k, value v, query q, decay a (at most 1) and, by the delta rule, rate b:

    S <- a S + k (x) v                  Mamba 2
    S <- a S + k (x) b (v - (a S)^T k)  gated delta net
    answer: S^T q

Steps of one token per row follow it literally. Others go chunk by chunk (https://arxiv.org/abs/2405.21060, section 6;
https://arxiv.org/abs/2412.06464, section 3.3): what tokens of a chunk do to each other is computed for all chunks at once, as
products of matrices, and only the states go from one to the next. All of it is float32.

T tokens, R rows, S lines of states, G groups of heads that share queries and keys, H heads of a group, K and V
their dimensions, N chunks of C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.kernels.state_rows import Chunks, StateRows


_SMALLEST_BLOCK = 8  # whose inverse is a sum of its powers


class Recurrence(NamedTuple):
    """What goes through it."""

    q: jax.Array  # [T, G, K]
    k: jax.Array  # [T, G, K]
    v: jax.Array  # [T, G, H, V]
    log_decay: jax.Array  # float32 [T, G, H], at most 0
    rate: jax.Array | None  # float32 [T, G, H] of the delta rule; None: values are added as they are


def causal_conv(
    x: jax.Array, taps: jax.Array, bias: jax.Array | None, held: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Each channel of x [T, channels] with `taps` [size, channels], the last for the token itself.

    `held` [S, size - 1, channels] are the inputs of the tokens before, which come back with those of the newest. Padding slots
    get something finite.
    """
    size = len(taps)
    before = jnp.where(rows.is_new[:, None, None], 0, held[rows.slots])
    if rows.chunks is None:
        seen = jnp.concatenate([before, x[:, None]], axis=1)
        out = jnp.sum(seen.astype(jnp.float32) * taps.astype(jnp.float32), axis=1)
        newest = seen[:, 1:]
    else:
        offset = jnp.arange(len(x)) - rows.cu_q_lens[rows.row_index]
        out = jnp.zeros(x.shape, jnp.float32)
        for tap in range(size):
            lag = size - 1 - tap
            earlier = before.at[rows.row_index, offset - lag + size - 1].get(mode="clip")
            seen = jnp.where((offset >= lag)[:, None], jnp.roll(x, lag, axis=0), earlier) if lag else x
            out += seen.astype(jnp.float32) * taps[tap].astype(jnp.float32)
        # Of row r the inputs [before, its tokens], the last of them.
        place = jnp.diff(rows.cu_q_lens)[:, None] + jnp.arange(size - 1)
        of_step = x.at[rows.cu_q_lens[:-1, None] + place - (size - 1)].get(mode="clip")
        of_before = jnp.take_along_axis(before, jnp.minimum(place, size - 2)[..., None], axis=1)
        newest = jnp.where((place >= size - 1)[..., None], of_step, of_before)
    if bias is not None:
        out += bias.astype(jnp.float32)
    return out.astype(x.dtype), held.at[rows.slots].set(newest)


def recur(inputs: Recurrence, states: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """-> (answers float32 [T, G, H, V], states). `states` float32 [S, G * H, K, V] go on from where the rows' last step left
    them. Padding slots get something finite."""
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    lines = states.reshape(len(states), *inputs.v.shape[1:3], *states.shape[2:])
    out, lines = _one_each(inputs, lines, rows) if rows.chunks is None else _by_chunks(inputs, lines, rows, rows.chunks)
    return out, lines.reshape(states.shape)


def _one_each(inputs: Recurrence, lines: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    q, k, v = inputs.q[:, :, None, :, None], inputs.k[:, :, None, :, None], inputs.v
    state = jnp.where(rows.is_new[:, None, None, None, None], 0, lines[rows.slots])
    state *= jnp.exp(inputs.log_decay)[..., None, None]
    if inputs.rate is not None:
        v = inputs.rate[..., None] * (v - jnp.sum(state * k, axis=-2))
    state += k * v[..., None, :]
    return jnp.sum(state * q, axis=-2), lines.at[rows.slots].set(state)


def _by_chunks(inputs: Recurrence, lines: jax.Array, rows: StateRows, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    def cut(x: jax.Array) -> jax.Array:
        """[T, G, ...] -> [N, G, ..., C] or, of vectors, [N, G, ..., C, dim]; zeros where there is no token."""
        is_live = chunks.is_live.reshape(*chunks.is_live.shape, *[1] * (x.ndim - 1))
        return jnp.where(is_live, x[chunks.tokens], 0)

    q, k = (jnp.moveaxis(cut(x), 1, 2) for x in (inputs.q, inputs.k))  # [N, G, C, K]
    v = jnp.moveaxis(cut(inputs.v), 1, 3)  # [N, G, H, C, V]
    log_decay = jnp.cumsum(jnp.moveaxis(cut(inputs.log_decay), 1, 3), axis=-1)  # [N, G, H, C] since the chunk's begin
    size = q.shape[2]
    since = log_decay[..., :, None] - log_decay[..., None, :]
    is_seen = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.exp(jnp.where(is_seen, since, -jnp.inf))  # [N, G, H, C, C]: from a token to a later one
    from_begin = jnp.exp(log_decay)[..., None]
    scores = _product("ngik,ngjk->ngij", q, k)[:, :, None] * between
    reads = None
    if inputs.rate is not None:
        rate = jnp.moveaxis(cut(inputs.rate), 1, 3)[..., None]
        overlaps = jnp.where(is_seen & ~jnp.eye(size, dtype=bool), _product("ngik,ngjk->ngij", k, k)[:, :, None] * between, 0)
        wanted = jnp.concatenate([rate * v, rate * from_begin * k[:, :, None]], axis=-1)
        solved = _product("nghij,nghjd->nghid", _inverse(rate * overlaps), wanted)
        v, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    queries, to_end = from_begin * q[:, :, None], jnp.exp(log_decay[..., -1:] - log_decay)[..., None]
    keys = to_end * k[:, :, None]  # [N, G, H, C, K], as the next two
    decay = jnp.exp(log_decay[..., -1])[..., None, None]
    slots, is_new = rows.slots[chunks.rows], rows.is_new[chunks.rows] & chunks.begins_row

    def step(index: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lines, out = carried
        slot = slots[index]
        state = jnp.where(is_new[index], 0, jax.lax.dynamic_index_in_dim(lines, slot, keepdims=False))
        added = v[index] if reads is None else v[index] - _product("ghck,ghkv->ghcv", reads[index], state)
        answers = _product("ghck,ghkv->ghcv", queries[index], state) + _product("ghij,ghjv->ghiv", scores[index], added)
        state = decay[index] * state + _product("ghck,ghcv->ghkv", keys[index], added)
        lines = jax.lax.dynamic_update_index_in_dim(lines, state, slot, 0)
        return lines, jax.lax.dynamic_update_index_in_dim(out, answers, index, 0)

    lines, out = jax.lax.fori_loop(0, chunks.count, step, (lines, jnp.zeros_like(v)))
    return out[chunks.chunk_of, :, :, chunks.place_of], lines


def _inverse(lower: jax.Array) -> jax.Array:
    """Of 1 + a matrix [..., C, C] that has nothing on or above its diagonal.

    Larger blocks come of smaller ones, by products of matrices alone: solvers of triangular systems are slow where systems are
    many and small (XLA's on a CPU took 20 times the rest of a step).
    """
    *outer, size, _ = lower.shape
    block = min(_SMALLEST_BLOCK, size)
    own = _blocks_below(lower, block, 0)
    squared = _product("...ij,...jk->...ik", own, own)
    whole = jnp.eye(block) - own
    whole += _product("...ij,...jk->...ik", whole, squared)  # 1 - own + own^2 - own^3, and so on: own^block is 0
    if block > 4:
        whole += _product("...ij,...jk->...ik", whole, _product("...ij,...jk->...ik", squared, squared))
    while block < size:
        first, second = whole[..., 0::2, :, :], whole[..., 1::2, :, :]
        between = _blocks_below(lower, block, 1)
        corner = -_product("...ij,...jk,...kl->...il", second, between, first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        whole, block = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2), 2 * block
    return whole.reshape(*outer, size, size)


def _blocks_below(matrix: jax.Array, size: int, step: int) -> jax.Array:
    """[..., C, C] -> [..., blocks, size, size]: those on its diagonal, or (step 1) of each second one what stands before it."""
    columns = range(0, matrix.shape[-1], size << step)
    return jnp.stack([matrix[..., at + step * size :, at:][..., :size, :size] for at in columns], axis=-3)


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)
