"""Stop strings and stop patterns: does the newest token complete one?

Only the tail of the output is decoded. A stop string of B bytes spans at most B tokens that show text, and every token is
checked when it arrives, so a match ends in the newest token's text and the last B tokens (plus slack for tokens without text
and for characters split between tokens) always hold it. Most tokens are ruled out without decoding a tail: a stop string's last
character must come with the newest token. A pattern has no such bounds: it sees the last `REGEX_TAIL_CHARS` characters.

Trimming the text is the detokenizer's business; this module only says what matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import regex

TAIL_SLACK_TOKENS = 8
REGEX_TAIL_CHARS = 256
SPLIT_CHARACTER = "\ufffd"  # decoders put it where a character's bytes are not complete
# A user's pattern must not be able to stall everybody: the search gives up after this time and the request is aborted.
REGEX_TIMEOUT_S = 0.05


class StopTextDecoder(Protocol):
    """The part of a tokenizer the scheduler needs."""

    def decode(self, token_ids: list[int]) -> str: ...


class SlowStopPatternError(Exception):
    """A stop pattern took too long on a short text."""


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


class StopTextMatcher:
    """The stop strings and patterns of one request."""

    def __init__(self, pieces: TokenPieces, stops: Sequence[str], patterns: Sequence[str]) -> None:
        """Raises ValueError with a sentence if a pattern is not a regular expression."""
        self._pieces = pieces
        self._decoder = pieces.decoder
        self._stops = tuple(stops)
        self._last_chars = frozenset(stop[-1] for stop in stops) | {SPLIT_CHARACTER}
        # A space at a token's beginning may not show when the token is decoded alone.
        self._skips_tokens = not patterns and " " not in self._last_chars
        self._patterns = tuple(_compile(pattern) for pattern in patterns)
        longest = max((len(stop.encode()) for stop in stops), default=0)
        self._tail_tokens = TAIL_SLACK_TOKENS + max(longest, REGEX_TAIL_CHARS if patterns else 0)

    def match(self, output_ids: np.ndarray) -> str | None:
        """The text that the newest of `output_ids` completed: a stop string, or what a pattern matched."""
        if self._skips_tokens and self._last_chars.isdisjoint(self._pieces[int(output_ids[-1])]):
            return None
        text = self._decoder.decode(output_ids[-self._tail_tokens :].tolist())
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            return min(found)[1]
        return self._match_patterns(text) if self._patterns else None

    def _match_patterns(self, text: str) -> str | None:
        start = max(len(text) - REGEX_TAIL_CHARS, 0)  # as a position, so that ^ still means the beginning of the text
        for pattern in self._patterns:
            try:
                for match in pattern.finditer(text, pos=start, timeout=REGEX_TIMEOUT_S):
                    if match.group():  # a pattern that also matches nothing would stop everything at once
                        return str(match.group())
            except TimeoutError as err:
                raise SlowStopPatternError(
                    f"stop_regex {pattern.pattern!r} took longer than {REGEX_TIMEOUT_S} s on {len(text)} characters."
                ) from err
        return None


def _compile(pattern: str) -> Any:
    try:
        return regex.compile(pattern)
    except regex.error as err:
        raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {err}.") from err
