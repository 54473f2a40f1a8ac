"""Rows of chunked attention: what each token of a step sees, spelled out from the arrays a backend gets."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.executor.attention_chunks import AttentionRows, check_page_size, chunk_rows
from jaxserve.executor.forward_batch import HEADER_LEN, Bucket, ForwardBatch, TokenPlacement, place_tokens
from jaxserve.executor.row_params import NUM_ROW_PARAMS

CHUNK, PAGE, MAX_PAGES = 8, 4, 12
PAGES = np.arange(3 * MAX_PAGES, dtype=np.int32).reshape(3, MAX_PAGES) + 100


def placed(seq_lens: list[int], extend_lens: list[int], bucket: Bucket) -> tuple[ForwardBatch, TokenPlacement]:
    rows = bucket.num_rows
    batch = ForwardBatch(
        jnp.zeros(HEADER_LEN, jnp.int32),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.asarray(seq_lens, jnp.int32),
        jnp.asarray(extend_lens, jnp.int32),
        jnp.ones(rows, jnp.int32),
        jnp.zeros((rows, NUM_ROW_PARAMS), jnp.int32),
        jnp.zeros((3, bucket.num_page_updates), jnp.int32),
        None if bucket.decode_only else jnp.zeros(bucket.num_tokens, jnp.int32),
    )
    return batch, place_tokens(batch, bucket)


def seen(rows: AttentionRows) -> dict[int, list[tuple[int, int]]]:
    """By token: (page, offset in it) of each key it sees."""
    found = {}
    for index, kv_len in enumerate(np.asarray(rows.kv_lens)):
        if rows.decode_q_len is None:
            tokens = range(int(rows.cu_q_lens[index]), int(rows.cu_q_lens[index + 1]))
        else:
            assert rows.decode_q_len == 1
            tokens = range(index, index + (kv_len > 0))
        for i, token in enumerate(tokens):
            places = range(kv_len - len(tokens) + i + 1)
            assert token not in found
            found[token] = [(int(rows.page_table[index, place // PAGE]), place % PAGE) for place in places]
    return found


@pytest.mark.parametrize(
    ("seq_lens", "extend_lens", "bucket"),
    [
        ([40, 0, 9], [40, 0, 2], Bucket(64, 3, 1, decode_only=False)),
        ([7, 8, 17], [7, 8, 17], Bucket(32, 3, 1, decode_only=False)),
        ([33, 16, 1], [26, 1, 1], Bucket(32, 3, 1, decode_only=False)),
        ([9, 10, 17], [2, 4, 10], Bucket(16, 3, 1, decode_only=False)),
        ([8, 9, 0], [1, 1, 0], Bucket(3, 3, 1, decode_only=True)),
        ([9, 17, 12], [3, 1, 4], Bucket(12, 3, 1, decode_only=True)),
    ],
)
def test_a_token_sees_its_chunk(seq_lens: list[int], extend_lens: list[int], bucket: Bucket) -> None:
    batch, placement = placed(seq_lens, extend_lens, bucket)
    rows = chunk_rows(batch, placement, jnp.asarray(PAGES), bucket, chunk_size=CHUNK, page_size=PAGE)
    expected = {}
    for token in np.flatnonzero(placement.is_live):
        row, position = int(placement.row_index[token]), int(placement.positions[token])
        keys = range(position // CHUNK * CHUNK, position + 1)
        expected[int(token)] = [(int(PAGES[row, key // PAGE]), key % PAGE) for key in keys]
    assert seen(rows) == expected


def test_a_chunk_is_whole_pages() -> None:
    check_page_size(32, 16)
    with pytest.raises(ValueError, match="--page-size must divide the model's attention_chunk_size=24; got 16"):
        check_page_size(24, 16)
