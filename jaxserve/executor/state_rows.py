"""Where the states of a step's rows come from and go to.

Each request row has a line of its own. Behind some pages of a row a state is kept for other requests, a snapshot, in a line of
the snapshots': the table has its number in the page's place, and -1 for pages without one. A row's state goes there instead of
to the row's line, and its next token goes on from there; so a snapshot takes no more memory traffic than none. A row that goes
on behind a cached prefix finds its state in the same way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.executor.forward_batch import Bucket, ForwardBatch, TokenPlacement
from jaxserve.kernels.state_rows import StateRows


def plan_states(
    batch: ForwardBatch,
    placement: TokenPlacement,
    bucket: Bucket,
    snapshots: jax.Array | None,
    page_size: int,
    *,
    num_rows: int,
) -> StateRows:
    """Of the first layer that keeps states. `snapshots` int32 [num_rows, max_pages]; None: there are none. In a step there are
    at most two of a row, and one of a row that decodes."""
    ends, starts = batch.seq_lens, batch.seq_lens - batch.extend_lens
    sources, cuts, targets = batch.rows, jnp.zeros((bucket.num_rows, 0), jnp.int32), batch.rows[:, None]
    if snapshots is not None:
        entries = snapshots[batch.rows]
        begun_from = _snapshot_at(entries, starts, page_size)
        sources = jnp.where(begun_from >= 0, num_rows + begun_from, sources)
        if bucket.decode_only:
            reached = _snapshot_at(entries, ends, page_size)[:, None]
            targets = jnp.where(reached >= 0, num_rows + reached, targets)
        else:
            behind = (1 + jnp.arange(entries.shape[1], dtype=jnp.int32)) * page_size
            is_passed = (entries >= 0) & (behind > starts[:, None]) & (behind <= ends[:, None])
            first, last = jnp.argmax(is_passed, axis=1), entries.shape[1] - 1 - jnp.argmax(is_passed[:, ::-1], axis=1)
            pages = jnp.stack([first, last], axis=1)
            cuts = jnp.where(jnp.any(is_passed, axis=1)[:, None], behind[pages] - starts[:, None], 0)
            lines = num_rows + jnp.take_along_axis(entries, pages, axis=1)
            targets = jnp.concatenate([lines, targets], axis=1)
    return StateRows.of(
        sources=sources,
        is_new=starts == 0,
        cu_q_lens=placement.cu_q_lens,
        row_index=placement.row_index,
        cuts=cuts,
        targets=targets,
        one_each=bucket.decode_only,
    )


def _snapshot_at(entries: jax.Array, lengths: jax.Array, page_size: int) -> jax.Array:
    """int32 [R]: the snapshot of each row's state behind so many tokens; below 0: there is none."""
    page = jnp.maximum(lengths // page_size - 1, 0)
    found = jnp.take_along_axis(entries, page[:, None], axis=1)[:, 0]
    return jnp.where((lengths > 0) & (lengths % page_size == 0), found, -1)
