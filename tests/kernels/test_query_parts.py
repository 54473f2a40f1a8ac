"""Rows of few queries, cut for a kernel that has room for fewer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.pallas.gpu.query_parts import QueryParts


@pytest.mark.parametrize(
    ("row_q_len", "most", "count", "q_len"),
    [(1, 4, 1, 1), (4, 4, 1, 4), (5, 4, 2, 3), (8, 4, 2, 4), (9, 4, 3, 3), (7, 8, 1, 7)],
)
def test_as_few_parts_as_can_be(row_q_len: int, most: int, count: int, q_len: int) -> None:
    assert QueryParts.of(row_q_len, most) == QueryParts(row_q_len, count, q_len)


def test_a_part_sees_the_keys_up_to_its_last_query() -> None:
    parts = QueryParts.of(5, 4)  # of three queries each
    kv_lens, q_lens = parts.lens(jnp.array([20, 0, 9, 4]), jnp.array([5, 0, 2, 4]))
    assert q_lens is not None
    assert q_lens.reshape(-1, 2).tolist() == [[3, 2], [0, 0], [2, 0], [3, 1]]
    assert kv_lens.reshape(-1, 2).tolist() == [[18, 20], [0, 0], [9, 0], [3, 4]]


@pytest.mark.parametrize("row_q_len", [1, 3, 5, 8])
def test_what_is_cut_is_joined_again(row_q_len: int) -> None:
    parts = QueryParts.of(row_q_len, 4)
    tokens = jnp.arange(6 * row_q_len * 2).reshape(-1, 2)
    cut = parts.cut(tokens)
    assert cut.shape == (6 * parts.count, parts.q_len, 2)
    np.testing.assert_array_equal(parts.join(cut), tokens)
    np.testing.assert_array_equal(parts.of_rows(jnp.arange(6)), np.repeat(np.arange(6), parts.count))
