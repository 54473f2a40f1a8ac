"""StateRows: which tokens of a step belong to which sequence's state, where states come from and go to, and how the step's work
falls into chunks.

Built once per step and read by all layers that keep states. A layer's states are the lines of arrays [lines, ...]; the caller
adds the layer's offset. A row's tokens may be cut into segments: behind each of them its state goes to a line of its own, and
the next segment goes on from there. So a state is kept for others without being copied.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax.typing

# Tokens of a chunk: what the published kernels take. Within one, work grows with its square.
CHUNK = 64
NO_LINE = 1 << 30  # with any offset behind the last line: writes to it are dropped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Pieces of at most `size` tokens of one segment each, in the order of the step's tokens; of N the first `count` are there.
    int32 [N], where nothing else is said."""

    count: jax.Array  # []
    starts: jax.Array  # token slot
    lengths: jax.Array
    sources: jax.Array  # line that the state comes from
    targets: jax.Array  # line that it goes to
    is_new: jax.Array  # bool: it begins with zeros
    size: int = dataclasses.field(metadata={"static": True})

    def part(self, first: jax.Array, count: int) -> Chunks:
        """`count` of them; behind the last stands the last again, and is not counted."""
        some = first + jnp.arange(count)
        starts, lengths, sources, targets, is_new = (
            array.at[some].get(mode="clip") for array in (self.starts, self.lengths, self.sources, self.targets, self.is_new)
        )
        return Chunks(jnp.minimum(self.count - first, count), starts, lengths, sources, targets, is_new, self.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateRows:
    """A step of T token slots and R rows of S segments each, of which some are empty."""

    sources: jax.Array  # int32 [R] line that the row's state comes from
    is_new: jax.Array  # bool [R] the row begins in this step: its state is zeros, whatever the line holds
    row_index: jax.Array  # int32 [T]
    starts: jax.Array  # int32 [R] the row's first token slot
    ends: jax.Array  # int32 [R, S] behind each segment's last token slot, in order
    targets: jax.Array  # int32 [R, S] line that the state behind a segment goes to; NO_LINE of an empty one
    chunks: Chunks | None  # None: row r has the token slots r * S:(r + 1) * S, each a segment, the first ones filled

    @staticmethod
    def in_chunks(
        *,
        sources: jax.Array,
        is_new: jax.Array,
        cu_q_lens: jax.Array,
        row_index: jax.Array,
        cuts: jax.Array,
        targets: jax.Array,
    ) -> StateRows:
        """`cuts` int32 [R, S - 1]: tokens of the row that lie before each cut, in order; `targets` [R, S]: lines for the states
        there, and at the end."""
        starts = cu_q_lens[:-1]
        ends = jnp.concatenate([starts[:, None] + cuts, cu_q_lens[1:, None]], axis=1)
        begins = jnp.concatenate([starts[:, None], ends[:, :-1]], axis=1)
        targets = jnp.where(ends > begins, targets, NO_LINE)
        chunks = _chunks(sources, is_new, begins, ends, targets, len(row_index))
        return StateRows(sources, is_new, row_index, starts, ends, targets, chunks)

    @staticmethod
    def in_turn(*, sources: jax.Array, is_new: jax.Array, targets: jax.Array) -> StateRows:
        """Rows of at most S tokens, behind each of which the state goes to a line of `targets` [R, S]; NO_LINE: no token."""
        token = jnp.arange(targets.size, dtype=jnp.int32).reshape(targets.shape)
        row_index = jnp.repeat(jnp.arange(len(targets), dtype=jnp.int32), targets.shape[1])
        return StateRows(sources, is_new, row_index, token[:, 0], token + 1, targets, None)

    def at(self, offset: jax.typing.ArrayLike) -> StateRows:
        """The same, `offset` lines further on."""
        chunks = self.chunks
        if chunks is not None:
            chunks = dataclasses.replace(chunks, sources=chunks.sources + offset, targets=chunks.targets + offset)
        return dataclasses.replace(self, sources=self.sources + offset, targets=self.targets + offset, chunks=chunks)


def _chunks(
    sources: jax.Array, is_new: jax.Array, begins: jax.Array, ends: jax.Array, targets: jax.Array, num_tokens: int
) -> Chunks:
    R, S = ends.shape
    size = min(CHUNK, 1 << (num_tokens - 1).bit_length())
    of_segment = (-(-(ends - begins) // size)).reshape(-1)
    last = jnp.cumsum(of_segment)
    most_segments = min(R * S, num_tokens)  # with a token at least; one of q tokens has at most 1 + (q - 1) / size chunks
    chunk = jnp.arange(most_segments + (num_tokens - most_segments) // size, dtype=jnp.int32)
    segment = jnp.minimum(jnp.searchsorted(last, chunk, side="right", method="compare_all"), R * S - 1).astype(jnp.int32)
    in_segment, row = chunk - (last - of_segment)[segment], segment // S
    starts = begins.reshape(-1)[segment] + in_segment * size
    begins_row = starts == begins[row, 0]
    is_first = in_segment == 0
    target = targets.reshape(-1)[segment]
    # Of a segment's first chunk the state comes from where the row's chunk before it went.
    before = jnp.concatenate([target[:1], target[:-1]])
    return Chunks(
        count=last[-1],
        starts=starts,
        lengths=jnp.clip(ends.reshape(-1)[segment] - starts, 0, size),
        sources=jnp.where(begins_row, sources[row], jnp.where(is_first, before, target)),
        targets=target,
        is_new=begins_row & is_new[row],
        size=size,
    )
