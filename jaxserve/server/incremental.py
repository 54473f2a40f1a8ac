"""Incremental decoding: the text that new tokens add to a sequence, for many sequences at once.

Text is not a sum over tokens: a character can be spread over several byte tokens, and a word's leading space can depend on
what stands before it. So each sequence keeps a short window of its last tokens; the window is decoded as a whole, and what
goes beyond the text already given out is new. Trailing U+FFFD may be a character that is not complete yet and is held back.
Two bounds keep windows short: one is cut at its last complete character when it grows long, and a character that does not
become complete within a few tokens never will.

Knows tokens and text, neither requests nor stop strings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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
    gained: list[str] = []
    to_measure: list[tuple[TokenWindow, int]] = []  # shortened windows, and the characters at their end still held back
    for window, text, end in zip(windows, texts, ended, strict=True):
        if end:
            gained.append(text[window.sent_chars :])
            continue
        held_chars = _take(window, text, gained)
        if held_chars is not None:
            to_measure.append((window, held_chars))
    if to_measure:
        for (window, held_chars), text in zip(to_measure, decode([w.tokens for w, _ in to_measure]), strict=True):
            window.sent_chars = max(0, len(text) - held_chars)
    return gained


def _take(window: TokenWindow, text: str, gained: list[str]) -> int | None:
    """Appends the new text; if the window was shortened, returns how many characters of it are still held back."""
    if not text.endswith(REPLACEMENT):
        return _take_whole(window, text, gained)
    if len(window.tokens) - window.whole_tokens <= _MOST_HELD_TOKENS:
        stable = text.rstrip(REPLACEMENT)
        gained.append(stable[window.sent_chars :])
        window.sent_chars = max(window.sent_chars, len(stable))
        return None
    # Broken bytes: only the last U+FFFD can still become a character.
    gained.append(text[window.sent_chars : -1])
    del window.tokens[:-_CHARACTER_TOKENS]
    window.whole_tokens = 0
    return 1


def _take_whole(window: TokenWindow, text: str, gained: list[str]) -> int | None:
    new_text = text[window.sent_chars :]
    gained.append(new_text)
    long = len(window.tokens) > _LONG_WINDOW_TOKENS
    if not new_text:
        if long:  # such as special tokens without end: they have no text, so they are no context either
            del window.tokens[window.whole_tokens :]
        return None
    window.sent_chars = len(text)
    previous_whole, window.whole_tokens = window.whole_tokens, len(window.tokens)
    if not long or not previous_whole:
        return None
    del window.tokens[:previous_whole]
    window.whole_tokens = len(window.tokens)
    return 0
