"""Where the states of a step's rows come from and go to.

Each request row has lines of its own: as many as a step may add tokens to it, so that the state behind each of the newest is
there, whichever draft was accepted. The state behind p tokens is in line p modulo their number. Behind some pages of a row a
state is kept for other requests, a snapshot, in a line of the snapshots': the table has its number in the page's place, and -1
for pages without one. A row's state goes there instead of to the row's line, and its next token goes on from there; so a
snapshot takes no more memory traffic than none. A row that goes on behind a cached prefix finds its state in the same way.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.executor.forward_batch import Bucket, ForwardBatch, TokenPlacement
from jaxserve.kernels.state_rows import NO_LINE, StateRows


@dataclasses.dataclass(frozen=True)
class StateLines:
    """Where a layer's states lie; lines of its own for each request row, then the snapshots'."""

    num_rows: int
    per_row: int  # most tokens that a decode step adds to a row
    page_size: int

    def behind(self, lengths: jax.Array, rows: jax.Array, entries: jax.Array | None) -> jax.Array:
        """int32 [R, N]: the lines of states behind so many tokens of `rows` [R]. `entries` [R, max_pages]: their snapshots."""
        own = rows[:, None] * self.per_row + lengths % self.per_row
        if entries is None:
            return own
        page = jnp.maximum(lengths // self.page_size - 1, 0)
        found = jnp.take_along_axis(entries, page, axis=1)
        is_kept = (lengths > 0) & (lengths % self.page_size == 0) & (found >= 0)
        return jnp.where(is_kept, self.of_snapshot(found), own)

    def of_snapshot(self, snapshot: jax.Array) -> jax.Array:
        return self.num_rows * self.per_row + snapshot


def plan_states(
    batch: ForwardBatch, placement: TokenPlacement, bucket: Bucket, snapshots: jax.Array | None, lines: StateLines
) -> StateRows:
    """Of the first layer that keeps states. `snapshots` int32 [num_rows, max_pages]; None: there are none. A step that does not
    only decode leaves at most two of a row."""
    ends, starts = batch.seq_lens, batch.seq_lens - batch.extend_lens
    entries = None if snapshots is None else snapshots[batch.rows]
    sources = lines.behind(starts[:, None], batch.rows, entries)[:, 0]
    if bucket.decode_only:
        reached = starts[:, None] + 1 + jnp.arange(bucket.tokens_per_row, dtype=jnp.int32)
        targets = jnp.where(reached <= ends[:, None], lines.behind(reached, batch.rows, entries), NO_LINE)
        return StateRows.in_turn(sources=sources, is_new=starts == 0, targets=targets)
    cuts, targets = jnp.zeros((bucket.num_rows, 0), jnp.int32), lines.behind(ends[:, None], batch.rows, None)
    if entries is not None:
        behind = (1 + jnp.arange(entries.shape[1], dtype=jnp.int32)) * lines.page_size
        is_passed = (entries >= 0) & (behind > starts[:, None]) & (behind <= ends[:, None])
        first, last = jnp.argmax(is_passed, axis=1), entries.shape[1] - 1 - jnp.argmax(is_passed[:, ::-1], axis=1)
        pages = jnp.stack([first, last], axis=1)
        cuts = jnp.where(jnp.any(is_passed, axis=1)[:, None], behind[pages] - starts[:, None], 0)
        targets = jnp.concatenate([lines.of_snapshot(jnp.take_along_axis(entries, pages, axis=1)), targets], axis=1)
    return StateRows.in_chunks(
        sources=sources,
        is_new=starts == 0,
        cu_q_lens=placement.cu_q_lens,
        row_index=placement.row_index,
        cuts=cuts,
        targets=targets,
    )
