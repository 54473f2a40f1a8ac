"""Texts that are far too long are refused, or cut, after reading little of them; all others are encoded whole."""

from __future__ import annotations

import pytest

from jaxserve.demo import demo_model_path
from jaxserve.server.prompt_encoding import TooManyTokensError, encode_within
from jaxserve.server.tokenizer import Tokenizer

MOST = 1000


class Words:
    """A tokenizer whose tokens are words; it remembers how much it was given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, text: str) -> list[int]:
        self.seen.append(len(text))
        return list(range(len(text.split())))


def test_a_usual_text_is_encoded_once() -> None:
    words = Words()
    text = "word " * (MOST + 5)  # too long by a little: the caller says so, with the exact number
    assert len(encode_within(words, text, MOST, 100, cut=False)) == MOST + 5
    assert words.seen == [len(text)]


def test_far_too_long_a_text_is_refused_after_the_first_of_it() -> None:
    words = Words()
    with pytest.raises(TooManyTokensError) as caught:
        encode_within(words, "a b " * 1_000_000, MOST, 10_000, cut=False)
    assert MOST < caught.value.at_least < 20_000
    assert sum(words.seen) < 50_000


def test_a_text_with_more_characters_than_the_longest_tokens_hold_is_not_read_at_all() -> None:
    words = Words()
    with pytest.raises(TooManyTokensError) as caught:
        encode_within(words, "x" * (MOST * 20 + 1), MOST, 20, cut=False)
    assert caught.value.at_least == MOST + 1 and not words.seen


def test_a_text_of_long_words_that_fits_is_encoded_whole() -> None:
    words = Words()
    text = " ".join(["x" * 60] * MOST)
    assert len(encode_within(words, text, MOST, 100, cut=False)) == MOST
    assert words.seen[-1] == len(text), "pieces were counted before, and their ids are of no use"


def test_a_text_that_may_be_cut_is_read_as_far_as_it_is_kept() -> None:
    words = Words()
    ids = encode_within(words, "a b " * 1_000_000, MOST, 10_000, cut=True)
    assert ids[:MOST] == list(range(MOST)) and sum(words.seen) < 100_000


@pytest.mark.parametrize("text", ["x" * 90_000, "\n" * 90_000, "é " * 50_000, "🚀" * 50_000, " " * 90_000])
def test_any_text_of_a_real_tokenizer_is_bounded(text: str) -> None:
    tokenizer = Tokenizer.load(demo_model_path())
    whole = tokenizer.encode(text)
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode_prompt(text, MOST, cut=False)
    assert MOST < caught.value.at_least <= len(whole)
    assert tokenizer.encode_prompt(text, MOST, cut=True)[:MOST] == whole[:MOST]
