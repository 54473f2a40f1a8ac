"""Where an answer ends because of a stop string or a stop pattern, in text that arrives in pieces.

Text that may be the beginning of a match is held back until the next text shows what it is, so that no part of a match ever
reaches a client. The scheduler decides *that* something matched; this finds where to cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.text.scanner import Scanner, moves_of


class StopFilter(Protocol):
    """Holds back text of one sequence."""

    def push(self, text: str) -> str:
        """Text that is safe to give out after `text` arrived."""

    def finish(self, text: str, matched: str | None) -> str:
        """The last text: cut at the match the scheduler found, or all that was held back if it found none."""


def stop_filter(stops: Sequence[str], patterns: Sequence[str]) -> StopFilter | None:
    """As the scheduler does: where there are patterns, they and the strings are looked for together."""
    if patterns:
        return StopPatternFilter(stops, patterns)
    return StopStringFilter(stops) if stops else None


class StopStringFilter:
    """`stops` are not empty, and none of them is an empty string."""

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        start = self._possible_start(text)
        self._held = text[start:]
        return text[:start]

    def finish(self, text: str, matched: str | None) -> str:
        text, self._held = self._held + text, ""
        return text if matched is None else cut_at(text, matched)

    def _possible_start(self, text: str) -> int:
        """Index of the longest end of `text` with which a stop string could begin; len(text) if there is none."""
        first = max(0, len(text) - self._longest + 1)
        for start in range(first, len(text)):
            end_len = len(text) - start
            for stop in self._stops:
                if len(stop) > end_len and stop[0] == text[start] and text.endswith(stop[:end_len]):
                    return start
        return len(text)


class StopPatternFilter:
    """Follows the patterns as the scheduler does."""

    __slots__ = ("_given_out", "_held", "_scanner")

    def __init__(self, stops: Sequence[str], patterns: Sequence[str]) -> None:
        self._scanner = Scanner(moves_of(tuple(patterns), tuple(stops)))
        self._held = ""
        self._given_out = 0  # characters

    def push(self, text: str) -> str:
        self._held += text
        # The scheduler would have ended the request at a match: it saw a special token in it, which is not shown.
        while (match := self._scanner.push(text)) is not None:
            text = self._text_from(match.end)
        safe = self._scanner.held_from - self._given_out
        given, self._held = self._held[:safe], self._held[safe:]
        self._given_out += safe
        return given

    def finish(self, text: str, matched: str | None) -> str:
        self._held += text
        if matched is None:
            return self._held
        match = self._scanner.push(text)
        if match is None or match.text != matched:
            return cut_at(self._held, matched)
        return self._held[: match.start - self._given_out]

    def _text_from(self, position: int) -> str:
        return self._held[position - self._given_out :]


def cut_at(text: str, stop: str) -> str:
    found = text.find(stop)
    return text if found < 0 else text[:found]
