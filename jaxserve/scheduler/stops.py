"""Stop strings and stop patterns: does the newest token complete one?

Where there are stop strings only, just the tail of the output is decoded. A stop string of B bytes spans at most B tokens that
show text, and every token is checked when it arrives, so a match ends in the newest token's text and the last B tokens (plus
slack for tokens without text and for characters split between tokens) always hold it. Most tokens are ruled out without
decoding a tail: a stop string's last character must come with the newest token.

A pattern has no such bounds. Where there is one, the text is decoded as the detokenizer decodes it, token by token, and each of
its characters moves an automaton, which also looks for the stop strings.

Trimming the text is the detokenizer's business; this module only says what matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.text.incremental import REPLACEMENT, advance, open_windows
from jaxserve.text.scanner import MAX_MATCH_CHARS, Scanner, moves_of

TAIL_SLACK_TOKENS = 8
# In which the beginning of a match is looked for.
_TAIL_CHARS = 2 * MAX_MATCH_CHARS


class StopTextDecoder(Protocol):
    """The part of a tokenizer the scheduler needs."""

    def decode(self, token_ids: list[int]) -> str: ...


class StopMatcher(Protocol):
    """What a request's text must not hold."""

    def match(self, output_ids: np.ndarray) -> str | None:
        """The text that the newest of `output_ids` completed: a stop string, or what a pattern matched."""

    def pattern_of(self, matched: str) -> str | None:
        """The pattern that matched what `match` has just returned; None if it was a string."""


class TokenPieces:
    """What each token looks like by itself, decoded once. Shared by all requests; at most the vocabulary's size."""

    def __init__(self, decoder: StopTextDecoder) -> None:
        self.decoder = decoder
        self._pieces: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self.decoder.decode([token_id])
        return piece


class StopStringMatcher:
    """The stop strings of a request that has no patterns."""

    def __init__(self, pieces: TokenPieces, stops: Sequence[str]) -> None:
        self._pieces = pieces
        self._decoder = pieces.decoder
        self._stops = tuple(stops)
        # Decoders put a replacement character where a character's bytes are not complete.
        self._last_chars = frozenset(stop[-1] for stop in stops) | {REPLACEMENT}
        # A space at a token's beginning may not show when the token is decoded alone.
        self._skips_tokens = " " not in self._last_chars
        self._tail_tokens = TAIL_SLACK_TOKENS + max(len(stop.encode()) for stop in stops)

    def match(self, output_ids: np.ndarray) -> str | None:
        if self._skips_tokens and self._last_chars.isdisjoint(self._pieces[int(output_ids[-1])]):
            return None
        text = self._decoder.decode(output_ids[-self._tail_tokens :].tolist())
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def pattern_of(self, matched: str) -> str | None:
        return None


class StopPatternMatcher:
    """The stop patterns and stop strings of one request."""

    def __init__(self, decoder: StopTextDecoder, prompt_tail: list[int], stops: Sequence[str], patterns: Sequence[str]) -> None:
        """Raises ValueError with a sentence if a pattern is not a regular expression, or not a supported one."""
        self._decoder = decoder
        self._stops, self._patterns = tuple(stops), tuple(patterns)
        self._scanner = Scanner(moves_of(self._patterns, self._stops))
        self._tail = ""  # the end of the text, and where in it the last match ends
        self._match_end = 0
        self._num_chars = 0
        self._window = open_windows([prompt_tail], self._decode)[0]
        self._num_seen = 0

    def match(self, output_ids: np.ndarray) -> str | None:
        new_tokens = output_ids[self._num_seen :].tolist()
        self._num_seen = len(output_ids)
        text = advance([self._window], [new_tokens], [False], self._decode)[0]
        self._tail, self._num_chars = self._tail[-_TAIL_CHARS:] + text, self._num_chars + len(text)
        match = self._scanner.push(text)
        if match is None:
            return None
        self._match_end = len(self._tail) - (self._num_chars - match.end)
        return match.text

    def pattern_of(self, matched: str) -> str | None:
        """Of several that end there, the one that the request names first."""
        if matched in self._stops:
            return None
        for pattern in self._patterns[:-1]:
            scanner, rest = Scanner(moves_of((pattern,))), self._tail
            while (match := scanner.push(rest)) is not None and match.end <= self._match_end:
                if match.end == self._match_end:
                    return pattern
                rest = self._tail[match.end :]
        return self._patterns[-1]

    def _decode(self, batch: list[list[int]]) -> list[str]:
        return [self._decoder.decode(token_ids) for token_ids in batch]
