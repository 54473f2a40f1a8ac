"""Byte-level decoding gives exactly the tokenizer's text, however the tokens are cut into messages."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_level, sentencepiece_like
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from jaxserve.server.tokenizer import RustDecoder
from jaxserve.text.byte_level import ByteLevelDecoding, byte_alphabet

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)


def tokenizer_with_odd_tokens() -> Tokenizer:
    """Added tokens whose text is not in the alphabet of bytes, or is in it and means bytes."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens(
        [AddedToken("two words", special=False), AddedToken("日本", special=False), AddedToken("ĠÃ", special=False)]
    )
    tokenizer.add_special_tokens([AddedToken("<|ünder score|>", special=True)])
    return tokenizer


TOKENIZER = tokenizer_with_odd_tokens()
NUM_IDS = TOKENIZER.get_vocab_size() + 3  # also ids that are no tokens
BYTES = [TOKENIZER.token_to_id(char) for char in byte_alphabet()]


def decoding(skip_special: bool = True) -> ByteLevelDecoding:
    bytes_of = RustDecoder(TOKENIZER).token_bytes(skip_special_tokens=skip_special)
    assert bytes_of is not None
    return ByteLevelDecoding(bytes_of)


def stream(decoder: ByteLevelDecoding, ids: list[int], sizes: list[int], tail: list[int]) -> str:
    (state,) = decoder.open([tail])
    texts, start, turn = [], 0, 0
    while True:
        end = start + sizes[turn % len(sizes)]
        last = end >= len(ids)
        texts += decoder.advance([state], [ids[start:end]], [last])
        if last:
            return "".join(texts)
        start, turn = end, turn + 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, NUM_IDS - 1), max_size=120), SIZES, st.booleans())
def test_any_tokens(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert stream(decoding(skip), ids, sizes, []) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(BYTES), max_size=40), SIZES)
def test_any_bytes(ids: list[int], sizes: list[int]) -> None:
    """Mostly no UTF-8 at all: as many U+FFFD, in the same places."""
    assert stream(decoding(), ids, sizes, []) == TOKENIZER.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), SIZES, st.integers(0, 12))
def test_text_behind_a_prompt(prompt: str, text: str, sizes: list[int], cut: int) -> None:
    """The prompt may end inside a character: its first bytes count for what follows."""
    ids = TOKENIZER.encode(prompt + text).ids
    cut = min(cut, len(ids))
    tail, new = ids[:cut], ids[cut:]
    begun = TOKENIZER.decode(tail)
    pending = next((n for n in range(4) if begun.endswith("\ufffd" * n) and not begun[: len(begun) - n].endswith("\ufffd")), 0)
    whole = TOKENIZER.decode(ids)
    if "\ufffd" not in prompt + text:
        assert stream(decoding(), new, sizes, tail) == whole[len(begun) - pending :]


def test_sequences_do_not_touch_each_other_and_nothing_is_half_done() -> None:
    decoder = decoding()
    rocket = TOKENIZER.encode("🚀").ids
    first, second = decoder.open([rocket[:1], []])
    assert decoder.advance([first, second], [rocket[1:-1], rocket[:1]], [False, False]) == ["", ""]
    before = (first.pending, second.pending)
    with pytest.raises(OverflowError):
        decoder.advance([first, second], [rocket[-1:], [-1]], [False, False])
    assert (first.pending, second.pending) == before
    assert decoder.advance([first, second], [rocket[-1:], []], [False, True]) == ["🚀", "\ufffd"]


def test_the_alphabet_is_the_librarys() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_other_decoders_are_not_that_simple() -> None:
    assert RustDecoder(sentencepiece_like()).token_bytes(skip_special_tokens=True) is None
