"""How embeddings come into a step: the lines that the host writes, and what the forward half makes of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.executor.input_embeds import EMBED_LINES, pack_embeds, with_given, write_embeds
from jaxserve.executor.ngram import NgramDrafter
from jaxserve.runner import NO_TOKEN_ID, EmbeddedTokens

WIDTH = 3


def lines(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.float32)[:, None] + np.zeros(WIDTH, np.float32)


@pytest.mark.parametrize("count", [1, EMBED_LINES - 1, EMBED_LINES, EMBED_LINES + 1, 2 * EMBED_LINES + 7])
@pytest.mark.parametrize("first_slot", [0, 5])
def test_lines_come_into_their_slots(count: int, first_slot: int) -> None:
    hidden = jnp.full((first_slot + count, WIDTH), -5.0)
    for packed in pack_embeds(EmbeddedTokens(first_slot, lines(count))):
        hidden = write_embeds(hidden, *packed)
    assert (np.asarray(hidden[:first_slot]) == -5).all()
    np.testing.assert_array_equal(hidden[first_slot:], lines(count))


def test_one_prompt_behind_the_other() -> None:
    hidden = jnp.zeros((300, WIDTH))
    for embeds in (EmbeddedTokens(2, lines(10, 100)), EmbeddedTokens(20, lines(150, 500)), EmbeddedTokens(170, lines(3, 900))):
        for packed in pack_embeds(embeds):
            hidden = write_embeds(hidden, *packed)
    np.testing.assert_array_equal(hidden[2:12], lines(10, 100))
    np.testing.assert_array_equal(hidden[20:170], lines(150, 500))
    np.testing.assert_array_equal(hidden[170:173], lines(3, 900))


def test_what_is_given_is_taken_where_there_is_no_id_and_in_the_models_type() -> None:
    hidden = jnp.full((8, WIDTH), jnp.nan).at[1].set(7.0)
    ids = jnp.asarray([4, NO_TOKEN_ID, 0])
    found = with_given(jnp.asarray(lines(3), jnp.bfloat16), ids, hidden)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), [[0.0] * 3, [7.0] * 3, [2.0] * 3])


def test_nothing_is_drafted_from_a_prompt_without_ids() -> None:
    """Placeholders equal each other; but none of them equals an output, with which every match must begin."""
    drafter = NgramDrafter(num_drafts=3, min_match=1, max_match=4)
    prompt = [NO_TOKEN_ID] * 6

    def drafts(*outputs: int) -> list[int]:
        sequence = prompt + list(outputs)
        history = jnp.asarray([sequence + [0] * (16 - len(sequence))], jnp.int32)
        return np.asarray(drafter.propose(history, jnp.asarray([len(sequence)])))[0].tolist()

    assert drafts(5) == drafts(5, 6) == [-1, -1, -1]
    assert drafts(5, 6, 5) == [6, 5, 6]
    assert drafts(5, 5) == [5, 5, 5]
