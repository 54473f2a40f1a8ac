"""What layers with states compute: a short causal convolution, and a linear recurrence whose state is a matrix per head.

The recurrence, of one head, with the token's key k, value v, query q, decay a (at most 1) and, by the delta rule, rate b:

    S <- a S + k (x) v                  Mamba 2
    S <- a S + k (x) b (v - (a S)^T k)  gated delta net
    answer: S^T q

Steps of one token per row, or of a few, follow it literally. Others go chunk by chunk (https://arxiv.org/abs/2405.21060,
section 6; https://arxiv.org/abs/2412.06464, section 3.3): what tokens of a chunk do to each other is computed for all chunks
at once, as products of matrices, and only the states go from one to the next. All of it is float32.

T tokens, G groups of heads that share queries and keys, H heads of a group, K and V their dimensions, N chunks of C tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxserve.kernels.filled import filled
from jaxserve.kernels.recurrence_arrays import PreparedChunks, Recurrence
from jaxserve.kernels.state_rows import Chunks, StateRows

_SMALLEST_BLOCK = 8  # whose inverse is a sum of its powers
_BATCH = 32  # chunks that are prepared at once


def causal_conv(
    x: jax.Array, taps: jax.Array, bias: jax.Array | None, held: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Each channel of x [T, channels] with `taps` [size, channels], the last for the token itself.

    `held` [lines, size - 1, channels] are the inputs of the tokens before, which come back with those of the newest. Padding
    slots get something finite.
    """
    size = len(taps)
    before = jnp.where(rows.is_new[:, None, None], 0, held[rows.sources])
    if rows.chunks is None:
        count = rows.targets.shape[1]
        seen = jnp.concatenate([before, x.reshape(-1, count, x.shape[1])], axis=1)
        windows = jnp.stack([seen[:, token : token + size] for token in range(count)], axis=1)
        out = jnp.sum(windows.astype(jnp.float32) * taps.astype(jnp.float32), axis=2).reshape(x.shape)
        newest = windows[:, :, 1:]
    else:
        offset = jnp.arange(len(x)) - rows.starts[rows.row_index]
        out = jnp.zeros(x.shape, jnp.float32)
        for tap in range(size):
            lag = size - 1 - tap
            earlier = before.at[rows.row_index, offset - lag + size - 1].get(mode="clip")
            seen = jnp.where((offset >= lag)[:, None], jnp.roll(x, lag, axis=0), earlier) if lag else x
            out += seen.astype(jnp.float32) * taps[tap].astype(jnp.float32)
        # Behind n tokens of a row: of its inputs [before, its tokens] those from n on.
        place = (rows.ends - rows.starts[:, None])[..., None] + jnp.arange(size - 1)
        of_step = x.at[rows.starts[:, None, None] + place - (size - 1)].get(mode="clip")
        of_before = before.at[jnp.arange(len(before))[:, None, None], place].get(mode="clip")
        newest = jnp.where((place >= size - 1)[..., None], of_step, of_before)
    if bias is not None:
        out += bias.astype(jnp.float32)
    return out.astype(x.dtype), held.at[rows.targets].set(newest, mode="drop")


def recur(inputs: Recurrence, states: jax.Array, rows: StateRows, *, is_exact: bool = True) -> tuple[jax.Array, jax.Array]:
    """-> (answers float32 [T, G, H, V], states). `states` float32 [lines, G * H, K, V] go on from where the rows' last step
    left them. Padding slots get something finite. Unless `is_exact`, products may be of numbers of 11 bits."""
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    lines = states.reshape(len(states), *inputs.v.shape[1:3], *states.shape[2:])
    if rows.chunks is None:
        out, lines = _in_turn(inputs, lines, rows)
    else:
        out, lines = _by_chunks(inputs, lines, rows.chunks, is_exact=is_exact)
    return out, lines.reshape(states.shape)


def _in_turn(inputs: Recurrence, lines: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    # Here, as it takes a second, which a server on a CPU can do without.
    from jaxserve.kernels.pallas.gpu import recurrence as gpu

    on_gpu = gpu.recurrent_step if gpu.takes_step(inputs) else tokens_in_turn
    result: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(inputs, lines, rows, cuda=on_gpu, default=tokens_in_turn)
    return result


def tokens_in_turn(inputs: Recurrence, lines: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """By XLA."""
    count = rows.targets.shape[1]
    # Fused into the scatters below, the gather would keep XLA from writing in place: it would copy all lines.
    state = jax.lax.optimization_barrier(lines[rows.sources])
    state = jnp.where(rows.is_new[:, None, None, None, None], 0, state)
    answers = []
    for turn in range(count):
        of_turn = jax.tree.map(lambda x, turn=turn: x[turn::count], inputs)
        q, k, v = of_turn.q[:, :, None, :, None], of_turn.k[:, :, None, :, None], of_turn.v
        state *= jnp.exp(of_turn.log_decay)[..., None, None]
        if of_turn.rate is not None:
            v = of_turn.rate[..., None] * (v - jnp.sum(state * k, axis=-2))
        state += k * v[..., None, :]
        answers.append(jnp.sum(state * q, axis=-2))
        lines = lines.at[rows.targets[:, turn]].set(state, mode="drop")
    return jnp.stack(answers, axis=1).reshape(inputs.v.shape), lines


def _by_chunks(inputs: Recurrence, lines: jax.Array, chunks: Chunks, *, is_exact: bool) -> tuple[jax.Array, jax.Array]:
    """Some chunks at a time, so that no more are computed than there are."""
    num_tokens, size, batch = len(inputs.q), chunks.size, min(_BATCH, len(chunks.starts))
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, size), *[(0, 0)] * (x.ndim - 1))), inputs)

    from jaxserve.kernels.pallas.gpu import recurrence as gpu

    scan = functools.partial(gpu.scan_chunks, is_exact=is_exact) if gpu.takes_chunks(inputs, size) else chunks_in_turn

    def go_on(first: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        some = chunks.part(first * batch, batch)
        prepared = _prepare(padded, some.starts, some.lengths, size)
        result: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(
            prepared, some, *carried, cuda=scan, default=chunks_in_turn
        )
        return result

    out = filled(padded.v.shape, 0, after=padded.v)
    lines, out = jax.lax.fori_loop(0, -(-chunks.count // batch), go_on, (lines, out))
    return out[:num_tokens], lines


def chunks_in_turn(prepared: PreparedChunks, chunks: Chunks, lines: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """By XLA: (lines, out [T + C, G, H, V]) with these chunks' answers. Behind a chunk `out` may hold anything."""

    def one(index: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lines, out = carried
        chunk = jax.tree.map(lambda x: x[index], prepared)
        state = jax.lax.dynamic_index_in_dim(lines, chunks.sources[index], keepdims=False)
        state = jnp.where(chunks.is_new[index], 0, state)
        added = chunk.values
        if chunk.reads is not None:
            added = added - _product("ghck,ghkv->ghcv", chunk.reads, state)
        answers = _product("ghck,ghkv->cghv", chunk.queries, state) + _product("ghij,ghjv->ighv", chunk.scores, added)
        state = chunk.decay * state + _product("ghck,ghcv->ghkv", chunk.keys, added)
        # What is written behind a chunk's last token is written again by the next chunk.
        out = jax.lax.dynamic_update_slice_in_dim(out, answers, chunks.starts[index], 0)
        return jax.lax.dynamic_update_index_in_dim(lines, state, chunks.targets[index], 0), out

    return jax.lax.fori_loop(0, chunks.count, one, (lines, out))


def _prepare(inputs: Recurrence, starts: jax.Array, lengths: jax.Array, size: int) -> PreparedChunks:
    """Of chunks that begin at token slots `starts` [N]."""
    place = jnp.arange(size)

    def cut(x: jax.Array) -> jax.Array:
        """[T, ...] -> [N, C, ...], zeros where there is no token."""
        is_live = (place < lengths[:, None]).reshape(len(starts), size, *[1] * (x.ndim - 1))
        return jnp.where(is_live, x[starts[:, None] + place], 0)

    q, k = (jnp.moveaxis(cut(x), 1, 2) for x in (inputs.q, inputs.k))  # [N, G, C, K]
    v = jnp.moveaxis(cut(inputs.v), 1, 3)  # [N, G, H, C, V]
    log_decay = jnp.cumsum(jnp.moveaxis(cut(inputs.log_decay), 1, 3), axis=-1)  # [N, G, H, C] since the chunk's begin
    since = log_decay[..., :, None] - log_decay[..., None, :]
    is_seen = place <= place[:, None]
    between = jnp.exp(jnp.where(is_seen, since, -jnp.inf))
    from_begin, to_end = jnp.exp(log_decay)[..., None], jnp.exp(log_decay[..., -1:] - log_decay)[..., None]
    reads = None
    if inputs.rate is not None:
        # What the delta rule writes depends on what it wrote before: a system of equations, by its matrix 1 + a triangle.
        rate = jnp.moveaxis(cut(inputs.rate), 1, 3)[..., None]
        overlaps = jnp.where(place < place[:, None], _product("ngik,ngjk->ngij", k, k)[:, :, None] * between, 0)
        wanted = jnp.concatenate([rate * v, rate * from_begin * k[:, :, None]], axis=-1)
        solved = _product("nghij,nghjd->nghid", _inverse(rate * overlaps), wanted)
        v, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return PreparedChunks(
        queries=from_begin * q[:, :, None],
        keys=to_end * k[:, :, None],
        values=v,
        scores=_product("ngik,ngjk->ngij", q, k)[:, :, None] * between,
        decay=jnp.exp(log_decay[..., -1])[..., None, None],
        reads=reads,
    )


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
