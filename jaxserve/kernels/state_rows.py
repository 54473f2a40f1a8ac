"""StateRows: which tokens of a step belong to which sequence's state, and how the step's work falls into chunks.

Built once per step and read by all layers that keep states. A layer's states are the lines of arrays [slots, ...]; the caller
adds the layer's offset.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax.typing

# Tokens of a chunk: what the published kernels take. Within one, work grows with its square.
CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Pieces of at most C tokens of one row each, row by row; of N the first `count` are there. All int32 but `is_live`."""

    count: jax.Array  # []
    rows: jax.Array  # [N]
    begins_row: jax.Array  # bool [N] the row's first chunk of the step
    tokens: jax.Array  # [N, C] slots of the step
    is_live: jax.Array  # bool [N, C]
    chunk_of: jax.Array  # [T] and
    place_of: jax.Array  # [T] where a token slot lies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateRows:
    """A step of T token slots and R rows."""

    slots: jax.Array  # int32 [R] each row's line of the states; of padding rows one that nobody reads
    is_new: jax.Array  # bool [R] the row begins in this step: its state is zeros, whatever its line holds
    cu_q_lens: jax.Array  # int32 [R + 1] row r's tokens are the slots cu_q_lens[r]:cu_q_lens[r + 1]
    row_index: jax.Array  # int32 [T]
    chunks: Chunks | None  # None: row r has the token r and no other

    @staticmethod
    def of(slots: jax.Array, is_new: jax.Array, cu_q_lens: jax.Array, row_index: jax.Array, *, one_each: bool) -> StateRows:
        """`one_each`: no row has more than one token."""
        chunks = None if one_each else _chunks(cu_q_lens, row_index)
        return StateRows(slots, is_new, cu_q_lens, row_index, chunks)

    def at(self, offset: jax.typing.ArrayLike) -> StateRows:
        """The same, `offset` lines further on."""
        return dataclasses.replace(self, slots=self.slots + offset)

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]


def _chunks(cu_q_lens: jax.Array, row_index: jax.Array) -> Chunks:
    T, R = len(row_index), len(cu_q_lens) - 1
    size = min(CHUNK, 1 << (T - 1).bit_length())
    of_row = -(-jnp.diff(cu_q_lens) // size)
    last = jnp.cumsum(of_row)
    # A row of q tokens has at most 1 + (q - 1) / size of them.
    chunk = jnp.arange(min(R, T) + max(T - R, 0) // size, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(last, chunk, side="right", method="compare_all"), R - 1).astype(jnp.int32)
    in_row = chunk - (last - of_row)[row]
    tokens = (cu_q_lens[row] + in_row * size)[:, None] + jnp.arange(size, dtype=jnp.int32)
    is_live = (tokens < cu_q_lens[row + 1][:, None]) & (chunk < last[-1])[:, None]
    offset = jnp.arange(T, dtype=jnp.int32) - cu_q_lens[row_index]
    return Chunks(
        count=last[-1],
        rows=row,
        begins_row=in_row == 0,
        tokens=jnp.minimum(tokens, T - 1),
        is_live=is_live,
        chunk_of=jnp.clip((last - of_row)[row_index] + offset // size, 0, len(chunk) - 1),
        place_of=offset % size,
    )
