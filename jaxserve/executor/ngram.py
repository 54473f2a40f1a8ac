"""Drafts by n-gram look-up, on the device: what followed the last few tokens the last time they stood in the sequence.

Prompt look-up decoding (https://github.com/apoorvumang/prompt-lookup-decoding). On the device, because the step that will
verify the drafts is launched before the host knows the tokens they follow. A pure function of the sequence so far.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    num_drafts: int  # most drafts per row
    min_match: int  # tokens that must agree before something is drafted
    max_match: int  # tokens that are compared; of equally long matches the latest wins

    def propose(self, history: jax.Array, lengths: jax.Array) -> jax.Array:
        """history int32 [R, C], of which row r holds lengths[r] tokens -> drafts int32 [R, num_drafts], -1 where none.

        A match may overlap the end: then the sequence is taken to go on repeating itself.
        """
        position = jnp.arange(history.shape[1], dtype=jnp.int32)
        last = lengths[:, None] - 1
        agrees = position < last
        match_len = jnp.zeros(history.shape, jnp.int32)
        for back in range(self.max_match):
            wanted = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
            agrees &= (jnp.roll(history, back, axis=1) == wanted) & (position >= back)
            match_len += agrees
        score = jnp.where(match_len >= self.min_match, match_len * history.shape[1] + position, -1)
        end = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
        found = jnp.take_along_axis(score, end, axis=1) >= 0
        ahead = jnp.arange(self.num_drafts, dtype=jnp.int32) % jnp.maximum(last - end, 1)
        return jnp.where(found, jnp.take_along_axis(history, end + 1 + ahead, axis=1), -1)
