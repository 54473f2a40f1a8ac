"""Queries of a step in groups of a few of one row, each of which the kernel for latents takes as a row of its own.

It multiplies 64 query rows whatever it is given, so that several tokens of few heads cost as much as one. A group's last query
is a token of the step; where a row's queries do not fill its groups, the first one begins before them, with queries whose
answers nobody reads. So the kernel needs to know of each group but how many keys its last query sees.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.kernels.metadata import decode_q_lens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryGroups:
    """G groups of Q queries; T tokens."""

    kv_lens: jax.Array  # int32 [G] keys that the last query sees; 0 of a group that is not needed
    rows: jax.Array  # int32 [G] the row it belongs to
    tokens: jax.Array  # int32 [G, Q]
    places: jax.Array  # int32 [T] where a token's query stands, of the G * Q; G * Q for padding

    @staticmethod
    def of(kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int, decode_q_len: int | None, *, q_len: int) -> QueryGroups:
        """Of a step as AttentionMetadata has it, in as few groups of `q_len` queries as can be."""
        num_rows, token = len(kv_lens), jnp.arange(num_tokens, dtype=jnp.int32)
        if decode_q_len is None:
            starts, q_lens = cu_q_lens[:-1], jnp.diff(cu_q_lens)
            row = _interval(cu_q_lens[1:], token)
            most = min(num_tokens, (num_tokens + num_rows * (q_len - 1)) // q_len)
        else:
            starts = jnp.arange(num_rows, dtype=jnp.int32) * decode_q_len
            q_lens = decode_q_lens(kv_lens, cu_q_lens, decode_q_len)
            row = token // decode_q_len
            most = num_rows * -(-decode_q_len // q_len)
        ends = jnp.cumsum(-(-q_lens // q_len), dtype=jnp.int32)  # in groups
        group = jnp.arange(most, dtype=jnp.int32)
        rows = _interval(ends, group)
        behind = (ends[rows] - 1 - group) * q_len  # of the row's queries
        last = starts[rows] + q_lens[rows] - 1 - behind
        in_group = jnp.arange(1 - q_len, 1, dtype=jnp.int32)
        from_end = starts[row] + q_lens[row] - 1 - token
        is_live = (from_end >= 0) & (token >= starts[row])
        place = (ends[row] - from_end // q_len) * q_len - 1 - from_end % q_len
        return QueryGroups(
            jnp.where(group < ends[-1], kv_lens[rows] - behind, 0),
            rows,
            jnp.clip(last[:, None] + in_group, 0, num_tokens - 1),
            jnp.where(is_live, place, most * q_len),
        )

    def cut(self, tokens: jax.Array) -> jax.Array:
        """[T, ...] -> [G, Q, ...]."""
        return tokens[self.tokens]

    def join(self, groups: jax.Array) -> jax.Array:
        """[G, Q, ...] -> [T, ...], zeros for padding."""
        flat = groups.reshape(-1, *groups.shape[2:])
        return flat.at[self.places].get(mode="fill", fill_value=0)


def _interval(ends: jax.Array, places: jax.Array) -> jax.Array:
    """int32: which interval each place lies in, of those that end at `ends`; the last one for what lies behind."""
    found = jnp.searchsorted(ends, places, side="right", method="compare_all")
    return jnp.minimum(found, len(ends) - 1).astype(jnp.int32)
