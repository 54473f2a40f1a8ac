"""Incremental decoding gives the text of decoding everything at once, however the tokens are cut into messages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_level, sentencepiece_like
from tokenizers import Tokenizer

from jaxserve.text.incremental import REPLACEMENT, DecodeBatch, advance, open_windows

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)
EMOJI_TEXT = "Family 👩‍👩‍👧‍👦 and 🚀🚀🚀, 日本語 — naïve café 🙂."


def decoder_of(tokenizer: Tokenizer, skip_special: bool = True) -> DecodeBatch:
    return lambda batch: tokenizer.decode_batch(batch, skip_special_tokens=skip_special)


def stream(ids: list[int], sizes: list[int], decode: DecodeBatch, prompt_tail: list[int] | None = None) -> list[str]:
    """The texts of one sequence whose tokens come in pieces of the given sizes, over and over."""
    window = open_windows([prompt_tail or []], decode)[0]
    texts, start, turn = [], 0, 0
    while True:
        end = start + sizes[turn % len(sizes)]
        last = end >= len(ids)
        texts += advance([window], [ids[start:end]], [last], decode)
        assert len(window.tokens) < 64 + max(sizes), f"the window grew to {len(window.tokens)} tokens"
        if last:
            return texts
        start, turn = end, turn + 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=120), SIZES)
def test_byte_level_is_exact_for_any_tokens(ids: list[int], sizes: list[int]) -> None:
    decode = decoder_of(byte_level())
    assert "".join(stream(ids, sizes, decode)) == decode([ids])[0]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), SIZES, st.sampled_from([byte_level, sentencepiece_like]))
def test_real_text_is_exact(text: str, sizes: list[int], make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    decode = decoder_of(tokenizer)
    ids = tokenizer.encode(text).ids
    assert "".join(stream(ids, sizes, decode)) == decode([ids])[0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_long_text_with_characters_of_many_tokens(make: object, size: int) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(EMOJI_TEXT * 20).ids
    decode = decoder_of(tokenizer)
    texts = stream(ids, [size], decode)
    assert "".join(texts) == decode([ids])[0]
    assert not any(REPLACEMENT in text for text in texts), "half a character was given out"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("skip_special", [True, False])
def test_special_tokens_between_words(make: object, skip_special: bool) -> None:
    tokenizer = make()  # type: ignore[operator]
    special = tokenizer.token_to_id("<|end|>") or tokenizer.token_to_id("</s>")
    word = tokenizer.encode("Hello world").ids
    ids = [special, *word, special, special, *word, *[special] * 60, *word]
    decode = decoder_of(tokenizer, skip_special)
    assert "".join(stream(ids, [1], decode)) == decode([ids])[0]


def test_broken_bytes_come_out_bounded_and_not_at_the_end_only() -> None:
    """A model that writes continuation bytes for ever is neither held back nor decoded again and again from the start."""
    tokenizer = byte_level()
    lone = tokenizer.token_to_id("Ģ")  # byte 0x80
    decode = decoder_of(tokenizer)
    texts = stream([lone] * 500, [1], decode)
    assert "".join(texts) == REPLACEMENT * 500
    assert len("".join(texts[:50])) > 30


def test_sentencepiece_first_word_depends_on_the_prompt() -> None:
    """`▁world` after a prompt begins with a space; as the very first token of a text it does not."""
    tokenizer = sentencepiece_like()
    world, hello = tokenizer.token_to_id("▁world"), tokenizer.token_to_id("▁Hello")
    decode = decoder_of(tokenizer)
    assert stream([world], [1], decode, prompt_tail=[hello]) == [" world"]
    assert stream([world], [1], decode) == ["world"]


def test_prompt_that_ends_within_a_character() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "ðŁĺĢ"]  # the four bytes of an emoji
    decode = decoder_of(tokenizer)
    assert "".join(stream(ids[2:], [1], decode, prompt_tail=ids[:2])) == "😀"


def test_many_sequences_at_once_do_not_mix() -> None:
    tokenizer = byte_level()
    decode = decoder_of(tokenizer)
    rng = random.Random(5)
    sequences = [[rng.randrange(tokenizer.get_vocab_size()) for _ in range(40)] for _ in range(17)]
    windows = open_windows([[] for _ in sequences], decode)
    texts = [""] * len(sequences)
    for step in range(40):
        gained = advance(windows, [[s[step]] for s in sequences], [step == 39] * len(sequences), decode)
        texts = [text + new for text, new in zip(texts, gained, strict=True)]
    assert texts == decode(sequences)
