"""Incremental decoding where a token is a string of bytes, and a text the UTF-8 of its tokens' bytes: byte-level BPE.

Only new tokens are looked at. A sequence remembers no more than the bytes at its end that may still become a character; bytes
that cannot become one are a U+FFFD each time, as decoding all of them at once would give.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Sequence

_new_utf8 = codecs.getincrementaldecoder("utf-8")


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table): printable ones for themselves, the
    others, in order, for the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclasses.dataclass(slots=True)
class OpenCharacter:
    """One sequence: the bytes at its end that are no whole character yet."""

    pending: bytes = b""


class _TokenTexts(dict[int, str | bytes]):
    """By token id: its text, or its bytes if they are not whole characters."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._bytes_of(token_id)
        try:
            text: str | bytes = data.decode()
        except UnicodeDecodeError:
            text = data
        self[token_id] = text
        return text


class ByteLevelDecoding:
    """Decodes for any number of sequences."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._texts = _TokenTexts(bytes_of)

    def open(self, prompt_tails: Sequence[list[int]]) -> list[OpenCharacter]:
        """New sequences behind the ends of their prompts, whose whole characters count as given out."""
        return [OpenCharacter(self._decode(b"", tail, is_last=False)[1]) for tail in prompt_tails]

    def advance(self, sequences: Sequence[OpenCharacter], new_tokens: Sequence[list[int]], ended: Sequence[bool]) -> list[str]:
        """The text that each sequence gains. The last text of an `ended` one holds nothing back. Whole or not at all."""
        texts = self._texts
        gained: list[str] = []
        pending: list[tuple[OpenCharacter, bytes]] = []
        for sequence, tokens, is_last in zip(sequences, new_tokens, ended, strict=True):
            if len(tokens) == 1 and not sequence.pending and type(text := texts[tokens[0]]) is str:
                gained.append(text)
                continue
            text, left = self._decode(sequence.pending, tokens, is_last=is_last)
            gained.append(text)
            pending.append((sequence, left))
        for sequence, left in pending:
            sequence.pending = left
        return gained

    def _decode(self, before: bytes, tokens: list[int], *, is_last: bool) -> tuple[str, bytes]:
        """(text, bytes that may still become a character)"""
        parts = [text.encode() if isinstance(text := self._texts[token], str) else text for token in tokens]
        decoder = _new_utf8("replace")
        text = decoder.decode(before + b"".join(parts), is_last)
        return text, decoder.getstate()[0]
