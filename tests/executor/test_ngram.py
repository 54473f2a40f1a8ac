"""Drafts against a plain search through the sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.executor.ngram import NgramDrafter

CONTEXT_LEN = 24
DRAFTERS = (NgramDrafter(3, 1, 4), NgramDrafter(5, 2, 3), NgramDrafter(1, 3, 12))
propose = jax.jit(NgramDrafter.propose, static_argnums=0)


def by_hand(drafter: NgramDrafter, tokens: list[int]) -> list[int]:
    best = (0, -1)
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(drafter.max_match, end + 1) and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length >= drafter.min_match:
            best = max(best, (length, end))
    if best[1] < 0:
        return [-1] * drafter.num_drafts
    following = tokens[best[1] + 1 :]
    return [following[i % len(following)] for i in range(drafter.num_drafts)]


@settings(max_examples=60, deadline=None)
@given(
    drafter=st.sampled_from(DRAFTERS),
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=CONTEXT_LEN), min_size=4, max_size=4),
    garbage=st.integers(0, 3),
)
def test_drafts_are_what_followed_the_longest_then_latest_match(
    drafter: NgramDrafter, sequences: list[list[int]], garbage: int
) -> None:
    history = np.full((4, CONTEXT_LEN), garbage, np.int32)
    for row, tokens in enumerate(sequences):
        history[row, : len(tokens)] = tokens
    lengths = jnp.asarray([len(tokens) for tokens in sequences], jnp.int32)
    drafts = np.asarray(propose(drafter, jnp.asarray(history), lengths))
    assert drafts.tolist() == [by_hand(drafter, tokens) for tokens in sequences]


@pytest.mark.parametrize(("tokens", "drafts"), [([7], [-1, -1, -1]), ([1, 2, 1, 2], [1, 2, 1]), ([5, 5], [5, 5, 5])])
def test_a_sequence_that_repeats_itself_is_taken_to_go_on(tokens: list[int], drafts: list[int]) -> None:
    history = jnp.asarray([tokens + [9] * (CONTEXT_LEN - len(tokens))], jnp.int32)
    assert propose(NgramDrafter(3, 1, 4), history, jnp.asarray([len(tokens)])).tolist() == [drafts]
