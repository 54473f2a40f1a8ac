"""What `Source` says, as array operations: an array of ours out of the tensors of a checkpoint, while JAX traces.

`loading` does the same on the host, block by block. Here the rows of each shard are put together along an axis of their own,
so that XLA, which divides the result by that axis, moves nothing that stands on the right device already.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.models.arrays import ArrayInfo, Rows, Source, Stacked

_LEAST_LENGTH = 1e-12  # what the length of a row is taken for if it is less


def arrange(tensors: Sequence[jax.Array], source: Source, info: ArrayInfo, num_shards: int) -> jax.Array:
    """An array of `info`'s shape and type, or of one matrix of it, from tensors of `source.shapes`. `num_shards`: over how
    many devices its rows are divided, if they are alike; only speed depends on it."""
    of_rows = [_of_rows(tensor, source) for tensor in tensors]
    return _finish(of_rows, source, info, num_shards)


def arrange_stack(stacks: Sequence[jax.Array], source: Source, info: ArrayInfo) -> jax.Array:
    """All matrices at once, of tensors that hold one of each in order; `source` is the first one's."""
    of_rows = [jnp.swapaxes(stack, -1, -2) if source.in_first else stack for stack in stacks]
    return _finish(of_rows, source, info, 1)


def is_in_order(stacked: Stacked) -> bool:
    """Whether the fused tensor's matrices are the array's, one for one."""
    num_matrices = stacked.fused[0].shapes[0][0]
    return are_alike(stacked.fused) and [source.matrix for source in stacked.fused] == list(range(num_matrices))


def are_alike(sources: Sequence[Source]) -> bool:
    """But for which tensors, or which matrices, they are of."""
    return len({(source.rows, source.transposed, source.in_first, source.first_column) for source in sources}) == 1


def _of_rows(tensor: jax.Array, source: Source) -> jax.Array:
    """[out] or [out, in] of what stands in a file."""
    if source.of_conv:
        tensor = tensor[:, 0]
    if source.matrix is not None:
        tensor = tensor[source.matrix]
    return tensor.T if source.in_first else tensor


def _finish(tensors: Sequence[jax.Array], source: Source, info: ArrayInfo, num_shards: int) -> jax.Array:
    """tensors [..., out] or [..., out, in]."""
    num_axes = tensors[0].ndim
    row_axis = column_axis = num_axes - 1
    if len(info.shape) - ("experts" in info.logical_axes) > 1:
        # First of all, where it meets the transposition that made a tensor of somebody's [in, out] kernel.
        tensors = [jnp.swapaxes(tensor, -1, -2) for tensor in tensors] if source.transposed else tensors
        row_axis, column_axis = (num_axes - 1, num_axes - 2) if source.transposed else (num_axes - 2, num_axes - 1)
        begin, count = source.first_column, info.shape[column_axis - num_axes]
        if count < tensors[0].shape[column_axis]:  # else nothing is done, which `WholeArray.only_moves` is to see
            tensors = [jax.lax.slice_in_dim(tensor, begin, begin + count, axis=column_axis) for tensor in tensors]
    rows = _take_rows(tensors, source.rows, num_shards, row_axis)
    if source.unit_rows:
        wide = rows.astype(jnp.float32)
        rows = wide / jnp.maximum(jnp.linalg.norm(wide, axis=column_axis, keepdims=True), _LEAST_LENGTH)
    return rows.astype(info.dtype)


def _take_rows(tensors: Sequence[jax.Array], rows: Sequence[Rows], num_shards: int, axis: int) -> jax.Array:
    if list(rows) == [Rows(0, 0, tensors[0].shape[axis])]:
        return tensors[0]
    by_shard = _divide(rows, _num_runs(rows, num_shards))
    kinds = [_kinds(shard) for shard in by_shard]
    if any(kind != kinds[0] for kind in kinds):  # such as zeros behind a vocabulary
        by_shard = [list(rows)]
    blocks = [_blocks(tensors, pieces, axis) for pieces in zip(*by_shard, strict=True)]
    joined = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])


def _kinds(rows: Sequence[Rows]) -> list[tuple[int | None, int, int]]:
    return [(row.tensor, row.count, row.step) for row in rows]


def _num_runs(rows: Sequence[Rows], num_shards: int) -> int:
    """How often the same kinds of rows follow one another, if shards hold whole runs; else the shards. With runs as an axis,
    tensors are put together in few pieces."""
    kinds = _kinds(rows)
    periods = (size for size in range(1, len(kinds) + 1) if len(kinds) % size == 0)
    num_runs = len(kinds) // next(size for size in periods if kinds == kinds[:size] * (len(kinds) // size))
    return num_runs if num_runs % num_shards == 0 else num_shards


def _divide(rows: Sequence[Rows], num_shards: int) -> list[list[Rows]]:
    """Those of each of equal parts."""
    size = sum(row.count for row in rows) // num_shards
    shards: list[list[Rows]] = [[] for _ in range(num_shards)]
    place = 0
    for row in rows:
        done = 0
        while done < row.count:
            count = min(row.count - done, size - place % size)
            shards[place // size].append(Rows(row.tensor, row.start + done * row.step, count, row.step))
            done, place = done + count, place + count
    return shards


def _blocks(tensors: Sequence[jax.Array], pieces: Sequence[Rows], axis: int) -> jax.Array:
    """[..., shards, rows, ...]: each shard's piece, all of one tensor and of one size."""
    first = pieces[0]
    if first.tensor is None:
        like = tensors[0]
        return jnp.zeros((*like.shape[:axis], len(pieces), first.count, *like.shape[axis + 1 :]), like.dtype)
    tensor, starts = tensors[first.tensor], [piece.start for piece in pieces]
    span = (first.count - 1) * first.step + 1
    stride = starts[1] - starts[0] if len(starts) > 1 else tensor.shape[axis]
    within = starts[0] % stride if stride > 0 else 0
    begin, end = starts[0] - within, starts[0] - within + len(pieces) * stride
    is_even = stride >= within + span and starts == list(range(starts[0], starts[0] + len(starts) * stride, stride))
    if is_even and end <= tensor.shape[axis]:
        whole = jax.lax.slice_in_dim(tensor, begin, end, axis=axis)
        parts = whole.reshape(*tensor.shape[:axis], len(pieces), stride, *tensor.shape[axis + 1 :])
        return jax.lax.slice_in_dim(parts, within, within + span, first.step, axis + 1)
    copies = starts.count(starts[0])
    if copies > 1 and starts == [start for start in starts[::copies] for _ in range(copies)]:  # of key/value heads
        return jnp.repeat(_blocks(tensors, pieces[::copies], axis), copies, axis)
    cuts = [jax.lax.slice_in_dim(tensor, start, start + span, first.step, axis) for start in starts]
    return jnp.stack(cuts, axis)
