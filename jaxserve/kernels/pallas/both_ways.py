"""Attention that is not causal, by kernels of causal attention: to them, queries stand further behind than they do.

Of a whole text, a query at position p that sees the keys in (p - w, p + w) is a causal one at p + w - 1 with a window of
2 w - 1; one that sees all keys is a causal one behind them all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# As good as none: wider than any context. Twice this and a position are an int32.
_WIDEST = 1 << 28


def causal_window(window: int | None) -> int | None:
    """For a sliding window of attention that is not causal."""
    return None if window is None else 2 * min(window, _WIDEST) - 1


def first_positions(kv_lens: jax.Array, window: int | None) -> jax.Array:
    """int32 [R]: where the first query of each text stands, which has kv_lens [R] tokens."""
    return kv_lens if window is None else jnp.full_like(kv_lens, min(window, _WIDEST) - 1)
