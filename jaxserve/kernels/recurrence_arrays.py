"""What goes through a linear recurrence, token by token or in chunks; letters as in `recurrence`."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Recurrence(NamedTuple):
    """What goes through it."""

    q: jax.Array  # [T, G, K]
    k: jax.Array  # [T, G, K]
    v: jax.Array  # [T, G, H, V]
    log_decay: jax.Array  # float32 [T, G, H], at most 0
    rate: jax.Array | None  # float32 [T, G, H] of the delta rule; None: values are added as they are


class PreparedChunks(NamedTuple):
    """Of N chunks: all that does not depend on the state that each begins with."""

    queries: jax.Array  # [N, G, H, C, K] with the decay since the chunk's begin
    keys: jax.Array  # [N, G, H, C, K] with the decay to its end
    values: jax.Array  # [N, G, H, C, V]
    scores: jax.Array  # [N, G, H, C, C] of a token's query and an earlier one's key, or its own, with the decay between
    decay: jax.Array  # [N, G, H, 1, 1] of the whole chunk
    reads: jax.Array | None  # [N, G, H, C, K] by the delta rule: what of the state is taken off the values
