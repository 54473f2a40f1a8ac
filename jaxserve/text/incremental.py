"""Incremental decoding: the text that new tokens add to a sequence, for many sequences at once.

Text is not a sum over tokens: a character can be spread over several byte tokens, and a word's leading space can depend on
what stands before it. So each sequence keeps a short window of its last tokens; the window is decoded as a whole, and what
goes beyond the text already given out is new. A U+FFFD at the end may be a character that is not complete yet: its tokens are
held back. Two bounds keep windows short: a long one is cut at its last complete character but one, and a character that does
not become complete within a few tokens never will.

Knows tokens and text, neither requests nor stop strings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"

# A window longer than this is cut at the last complete character.
_LONG_WINDOW_TOKENS = 24
# Tokens after the last complete character that make a broken one certain (UTF-8 needs at most 4 bytes, so 4 tokens).
_MOST_HELD_TOKENS = 8
# Enough tokens to hold every byte of an incomplete character.
_CHARACTER_TOKENS = 4

DecodeBatch = Callable[[list[list[int]]], list[str]]


@dataclasses.dataclass(slots=True)
class TokenWindow:
    """One sequence's last tokens and how much of their text has been given out."""

    tokens: list[int]
    sent_chars: int = 0  # of the window's text
    whole_tokens: int = 0  # the window's first so many tokens end with a complete character, all given out


class IncrementalDecoder(Protocol):
    """What gives sequences their text. Its states belong to it alone."""

    def open(self, prompt_tails: Sequence[list[int]]) -> Sequence[Any]:
        """States of new sequences behind the ends of their prompts."""

    def advance(self, sequences: Sequence[Any], new_tokens: Sequence[list[int]], ended: Sequence[bool]) -> list[str]:
        """The text that each sequence gains. If it raises, every state is as before."""


class WindowDecoding:
    """The IncrementalDecoder for any tokenizer that can decode."""

    def __init__(self, decode: DecodeBatch) -> None:
        self._decode = decode

    def open(self, prompt_tails: Sequence[list[int]]) -> list[TokenWindow]:
        return open_windows(prompt_tails, self._decode)

    def advance(self, sequences: Sequence[TokenWindow], new_tokens: Sequence[list[int]], ended: Sequence[bool]) -> list[str]:
        before = [(window.tokens.copy(), window.sent_chars, window.whole_tokens) for window in sequences]
        try:
            return advance(sequences, new_tokens, ended, self._decode)
        except Exception:
            for window, (tokens, sent_chars, whole_tokens) in zip(sequences, before, strict=True):
                window.tokens, window.sent_chars, window.whole_tokens = tokens, sent_chars, whole_tokens
            raise


def open_windows(prompt_tails: Sequence[list[int]], decode: DecodeBatch) -> list[TokenWindow]:
    """New windows whose context is the end of the prompt; its text counts as given out."""
    texts = decode(list(prompt_tails)) if any(prompt_tails) else [""] * len(prompt_tails)
    return [
        TokenWindow(list(tail), len(text.rstrip(REPLACEMENT)), len(tail))
        for tail, text in zip(prompt_tails, texts, strict=True)
    ]


def advance(
    windows: Sequence[TokenWindow], new_tokens: Sequence[list[int]], ended: Sequence[bool], decode: DecodeBatch
) -> list[str]:
    """Adds tokens to each window; returns the text each gained. The last text of an `ended` one holds nothing back."""
    for window, tokens in zip(windows, new_tokens, strict=True):
        window.tokens.extend(tokens)
    texts = decode([window.tokens for window in windows])
    broken = [i for i, text in enumerate(texts) if text.endswith(REPLACEMENT) and not ended[i]]
    cut = dict(zip(broken, _without_broken_end([windows[i] for i in broken], decode), strict=True)) if broken else {}
    gained: list[str] = []
    shortened: list[_Shortened] = []
    for i, (window, text) in enumerate(zip(windows, texts, strict=True)):
        if ended[i]:
            new_text, short = text[window.sent_chars :], None
        elif i not in cut:
            new_text, short = _take_whole(window, text, len(window.tokens))
        elif (prefix := cut[i]) is not None:
            new_text, short = _take_whole(window, prefix.text, prefix.num_tokens)
        else:
            new_text, short = _take_broken(window, text)
        gained.append(new_text)
        if short is not None:
            shortened.append(short)
    if shortened:
        for short, text in zip(shortened, decode([short.tokens for short in shortened]), strict=True):
            short.window.sent_chars = max(0, len(text) - short.held_chars)
    return gained


@dataclasses.dataclass(slots=True)
class _Prefix:
    """The beginning of a window that ends with a complete character."""

    num_tokens: int
    text: str


@dataclasses.dataclass(slots=True)
class _Shortened:
    """A window that lost its front: the text of `tokens` but for `held_chars` has been given out."""

    window: TokenWindow
    tokens: list[int]
    held_chars: int


def _without_broken_end(windows: Sequence[TokenWindow], decode: DecodeBatch) -> list[_Prefix | None]:
    """Each window without the one to three tokens of a character that is not complete, or None if that does not mend it.

    Decoders with byte fallback give U+FFFD for every byte of a run whose end is broken, so looking at the text is not enough.
    """
    prefixes: list[list[int]] = []
    owners: list[int] = []
    for i, window in enumerate(windows):
        for count in range(1, _CHARACTER_TOKENS):
            if len(window.tokens) - count > window.whole_tokens:
                prefixes.append(window.tokens[:-count])
                owners.append(i)
    found: list[_Prefix | None] = [None] * len(windows)
    for i, tokens, text in zip(owners, prefixes, decode(prefixes), strict=True):
        if found[i] is None and not text.endswith(REPLACEMENT):
            found[i] = _Prefix(len(tokens), text)
    return found


def _take_whole(window: TokenWindow, text: str, num_tokens: int) -> tuple[str, _Shortened | None]:
    """`text` is that of the first `num_tokens` and ends with a complete character."""
    new_text = text[window.sent_chars :]
    is_long = len(window.tokens) > _LONG_WINDOW_TOKENS
    if not new_text:
        if is_long:  # such as special tokens without end: they have no text, so they are no context either
            del window.tokens[window.whole_tokens : num_tokens]
        return "", None
    window.sent_chars = len(text)
    previous_whole, window.whole_tokens = window.whole_tokens, num_tokens
    if not is_long or not previous_whole:
        return new_text, None
    del window.tokens[:previous_whole]
    window.whole_tokens -= previous_whole
    return new_text, _Shortened(window, window.tokens[: window.whole_tokens], 0)


def _take_broken(window: TokenWindow, text: str) -> tuple[str, _Shortened | None]:
    """`text` ends with U+FFFD, and not because of the last character alone."""
    if len(window.tokens) - window.whole_tokens <= _MOST_HELD_TOKENS:
        stable = text.rstrip(REPLACEMENT)
        new_text = stable[window.sent_chars :]
        window.sent_chars = max(window.sent_chars, len(stable))
        return new_text, None
    # These bytes never become characters; only the last U+FFFD still may.
    new_text = text[window.sent_chars : -1]
    del window.tokens[:-_CHARACTER_TOKENS]
    window.whole_tokens = 0
    return new_text, _Shortened(window, list(window.tokens), 1)
