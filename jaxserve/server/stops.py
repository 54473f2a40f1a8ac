"""Where an answer ends because of a stop string, in text that arrives in pieces.

Text that may be the beginning of a stop string is held back until the next text shows what it is, so that no part of a stop
string ever reaches a client. The scheduler decides *that* a stop string matched; this finds where to cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Holds back text of one sequence. `stops` are not empty, and none of them is an empty string."""

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is safe to give out after `text` arrived."""
        text = self._held + text
        start = self._possible_start(text)
        self._held = text[start:]
        return text[:start]

    def finish(self, text: str, matched: str | None) -> str:
        """The last text: cut at the stop string that matched, or all that was held back if none did."""
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


def cut_at(text: str, stop: str) -> str:
    found = text.find(stop)
    return text if found < 0 else text[:found]
