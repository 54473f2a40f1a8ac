"""Queries in groups for the kernel of latents."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.pallas.gpu.query_groups import QueryGroups

KV_LENS, Q_LENS = (20, 0, 9, 5, 2, 0), (5, 0, 1, 4, 2, 0)
NUM_TOKENS, MOST = 16, 6  # more than there are


def steps(decode_q_len: int | None) -> tuple[QueryGroups, list[tuple[int, int]]]:
    """Groups of up to 3 queries; (row, query of the row) of each token slot, or (-1, -1)."""
    cu_q_lens = np.concatenate([[0], np.cumsum(Q_LENS)])
    owners = [(row, query) for row, count in enumerate(Q_LENS) for query in range(count)]
    num_tokens = NUM_TOKENS
    if decode_q_len is not None:
        num_tokens = decode_q_len * len(Q_LENS)
        owners = [(row, query) for row in range(len(Q_LENS)) for query in range(decode_q_len)]
        owners = [owner if owner[1] < Q_LENS[owner[0]] else (-1, -1) for owner in owners]
    owners += [(-1, -1)] * (num_tokens - len(owners))
    arrays = jnp.array(KV_LENS, jnp.int32), jnp.array(cu_q_lens, jnp.int32)
    return QueryGroups.of(*arrays, num_tokens, decode_q_len, q_len=3), owners


@pytest.mark.parametrize("decode_q_len", [None, MOST])
def test_each_query_stands_in_one_group_at_its_position(decode_q_len: int | None) -> None:
    groups, owners = steps(decode_q_len)
    assert int(jnp.sum(groups.kv_lens > 0)) == sum(-(-count // 3) for count in Q_LENS)
    for token, (row, query) in enumerate(owners):
        group, at = divmod(int(groups.places[token]), 3)
        if row < 0:
            assert group == len(groups.kv_lens)
            continue
        assert int(groups.rows[group]) == row and int(groups.tokens[group, at]) == token
        # As the kernel has it: query i of a group is at position kv_len - 3 + i.
        assert int(groups.kv_lens[group]) - 3 + at == KV_LENS[row] - Q_LENS[row] + query


@pytest.mark.parametrize("decode_q_len", [None, MOST])
def test_what_is_cut_is_joined_again_with_zeros_for_padding(decode_q_len: int | None) -> None:
    groups, owners = steps(decode_q_len)
    tokens = jnp.arange(1.0, 1 + 2 * len(owners)).reshape(-1, 2)
    joined = groups.join(groups.cut(tokens))
    np.testing.assert_array_equal(joined, tokens * np.array([[row >= 0] for row, _ in owners]))


def test_few_tokens_make_few_groups() -> None:
    kv_lens, cu_q_lens = jnp.array([7, 0], jnp.int32), jnp.array([0, 1, 1], jnp.int32)
    assert len(QueryGroups.of(kv_lens, cu_q_lens, 2, None, q_len=4).kv_lens) == 2
    assert len(QueryGroups.of(kv_lens, cu_q_lens, 4096, None, q_len=4).kv_lens) == 1025
