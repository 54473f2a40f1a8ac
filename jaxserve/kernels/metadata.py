"""AttentionMetadata: which tokens of a step belong to which row, and which pages hold each row's keys and values.

Built once per step, completed by a backend's `plan` and read by all layers. It knows no heads, no layout and no layers: one
page id stands for the same page of every layer, and the caller adds the layer's offset.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Added to a pool's largest page offset this is still an int32, and no pool has such a page: writes to it are dropped.
NO_PAGE = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """A step of T token slots and R row slots. All arrays are int32; padding rows and padding tokens may stand anywhere."""

    kv_lens: jax.Array  # [R] tokens in the row's cache, this step's included; 0 for padding rows
    cu_q_lens: jax.Array  # [R + 1] row r has cu_q_lens[r + 1] - cu_q_lens[r] queries; padding rows have none
    page_table: jax.Array  # [R, max_pages] entries at or past ceil(kv_len / page_size) are garbage and never followed
    slot_pages: jax.Array  # [T] page each new token is written to; NO_PAGE or more for padding tokens
    slot_offsets: jax.Array  # [T] position inside that page
    # K, where no row has more queries: T == R * K, and row r's are the first of the tokens r * K:(r + 1) * K.
    # None: any number of them, row by row without gaps; row r's are the tokens cu_q_lens[r]:cu_q_lens[r + 1].
    decode_q_len: int | None = dataclasses.field(metadata={"static": True})
    work: Any = None  # the backend's own division of the step's work, a pytree; nobody else looks inside

    @property
    def num_tokens(self) -> int:
        return self.slot_pages.shape[0]

    @property
    def num_rows(self) -> int:
        return self.kv_lens.shape[0]

    def without_padding(self) -> AttentionMetadata:
        """Padding tokens at pages that no pool has (`drop_padding`)."""
        is_live = live_tokens(self.kv_lens, self.cu_q_lens, self.num_tokens, self.decode_q_len)
        return dataclasses.replace(self, slot_pages=drop_padding(self.slot_pages, is_live))


def decode_q_lens(kv_lens: jax.Array, cu_q_lens: jax.Array, decode_q_len: int) -> jax.Array:
    """int32 [R]: each row's queries in a step where none has more than `decode_q_len`."""
    # A sum over the rows would be a kernel of its own on GPUs, in every step.
    return (kv_lens > 0).astype(jnp.int32) if decode_q_len == 1 else jnp.diff(cu_q_lens)


def live_tokens(kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int, decode_q_len: int | None) -> jax.Array:
    """bool [T]: False for padding."""
    if decode_q_len is None:
        return jnp.arange(num_tokens, dtype=jnp.int32) < cu_q_lens[-1]
    assert num_tokens == len(kv_lens) * decode_q_len, f"{num_tokens} tokens in {len(kv_lens)} rows of {decode_q_len}"
    in_row = jnp.arange(decode_q_len, dtype=jnp.int32)
    return (in_row < decode_q_lens(kv_lens, cu_q_lens, decode_q_len)[:, None]).reshape(-1)


def drop_padding(slot_pages: jax.Array, is_live: jax.Array) -> jax.Array:
    """`slot_pages` with padding tokens at pages that no pool has, a different one each, so that indices stay unique."""
    nowhere = NO_PAGE + jnp.arange(slot_pages.shape[0], dtype=jnp.int32)
    return jnp.where(is_live & (slot_pages < NO_PAGE), slot_pages, nowhere)
