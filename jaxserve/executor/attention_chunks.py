"""Attention in chunks: a token sees those of its own chunk, positions from one multiple of the chunk's size to the next.

To a backend each chunk of a row is a row of its own, whose first token stands at position 0: it need not know of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.executor.forward_batch import Bucket, ForwardBatch, TokenPlacement


class AttentionRows(NamedTuple):
    """Rows as a backend's `plan` takes them (`AttentionMetadata`)."""

    kv_lens: jax.Array
    cu_q_lens: jax.Array
    page_table: jax.Array
    decode_q_len: int | None


def check_page_size(chunk_size: int, page_size: int) -> None:
    """ValueError unless a chunk is whole pages."""
    if chunk_size % page_size:
        raise ValueError(f"--page-size must divide the model's attention_chunk_size={chunk_size}; got {page_size}.")


def chunk_rows(
    batch: ForwardBatch, placement: TokenPlacement, pages: jax.Array, bucket: Bucket, *, chunk_size: int, page_size: int
) -> AttentionRows:
    """`pages` int32 [R, max_pages]: of each row of the step."""
    if not bucket.decode_only:
        return _of_prompts(placement, pages, bucket, chunk_size, page_size)
    if bucket.tokens_per_row == 1:
        last, row = batch.seq_lens - 1, jnp.arange(bucket.num_rows)
        kv_lens, cu_q_lens = jnp.where(last >= 0, last % chunk_size + 1, 0), placement.cu_q_lens
    else:
        # A draft may begin a chunk, so each token is a row.
        last, row = placement.positions, placement.row_index
        kv_lens = jnp.where(placement.is_live, last % chunk_size + 1, 0)
        cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(placement.is_live, dtype=jnp.int32)])
    return AttentionRows(kv_lens, cu_q_lens, _chunk_pages(pages, row, last, chunk_size, page_size), 1)


def _of_prompts(placement: TokenPlacement, pages: jax.Array, bucket: Bucket, chunk_size: int, page_size: int) -> AttentionRows:
    T, R, positions = bucket.num_tokens, bucket.num_rows, placement.positions
    begins_row = jnp.arange(T) == placement.cu_q_lens[placement.row_index]
    begins = placement.is_live & (begins_row | (positions % chunk_size == 0))
    # q tokens of a row begin at most 1 + ceil(q / chunk_size) chunks.
    most, end = min(T, 2 * R + T // chunk_size), placement.cu_q_lens[-1]
    first = jnp.nonzero(begins, size=most, fill_value=end)[0].astype(jnp.int32)
    cu_q_lens = jnp.append(first, end)
    last_token = jnp.maximum(cu_q_lens[1:] - 1, 0)
    last, row = positions[last_token], placement.row_index[last_token]
    kv_lens = jnp.where(jnp.diff(cu_q_lens) > 0, last % chunk_size + 1, 0)
    return AttentionRows(kv_lens, cu_q_lens, _chunk_pages(pages, row, last, chunk_size, page_size), None)


def _chunk_pages(pages: jax.Array, row: jax.Array, position: jax.Array, chunk_size: int, page_size: int) -> jax.Array:
    """int32 [rows, pages of a chunk]: of the chunk that `position` of the step's row `row` is in."""
    first = position // chunk_size * (chunk_size // page_size)
    return pages.at[row[:, None], first[:, None] + jnp.arange(chunk_size // page_size)].get(mode="clip")
