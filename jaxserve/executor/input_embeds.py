"""Embeddings from the host in place of token ids: how they come to the device, and how a step takes them.

The lines that the newest step left in ForwardState.hidden are those that the next step overwrites: an embedding waits there, in
the slot of its token, and the forward half takes it where the token's id is NO_TOKEN_ID. So a step without any costs no
transfer, and the step's input stays one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models import own_lines
from jaxserve.runner import EmbeddedTokens

# Lines of one call: 2 MiB at a hidden size of 4096.
EMBED_LINES = 128


def write_embeds(hidden: jax.Array, first_slot: jax.Array, lines: jax.Array) -> jax.Array:
    """Writes float32 [EMBED_LINES, E] into `hidden` [slots, E] from a slot, int32 [1], on. Lines behind the last embedding go
    where no slot is, or one whose token has an id, or an embedding that is written later."""
    slots = first_slot + jnp.arange(len(lines), dtype=jnp.int32)
    return hidden.at[slots].set(lines.astype(hidden.dtype), mode="drop")


def write_own_embeds(hidden: jax.Array, first_slot: jax.Array, lines: jax.Array) -> jax.Array:
    """The same in the shard that has the slot, among those of all shards; in the others nothing."""
    return write_embeds(hidden, own_lines(first_slot, len(hidden)), lines)


def pack_embeds(embeds: EmbeddedTokens) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What to call the writing program with."""
    for first in range(0, len(embeds.values), EMBED_LINES):
        lines = embeds.values[first : first + EMBED_LINES]
        if len(lines) < EMBED_LINES:
            lines = np.concatenate([lines, np.zeros((EMBED_LINES - len(lines), lines.shape[1]), np.float32)])
        yield np.full(1, embeds.first_slot + first, np.int32), lines


def with_given(x: jax.Array, token_ids: jax.Array, hidden: jax.Array) -> jax.Array:
    """Embedded tokens [T, E] for ids int32 [T], with what was given where there is no id."""
    given = hidden[: len(x)].astype(x.dtype)
    return jnp.where(token_ids[:, None] < 0, given, x)
