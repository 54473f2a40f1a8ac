"""RecvSkipper: in which rounds of its loop a busy scheduler looks for messages (`--scheduler-recv-interval`).

As in SGLang a counter decides. A decode round adds 1; any other round adds so much that the next one receives, for what it did
may matter to those who wait, and they may matter to it. Interval 1: every round receives.
"""

from __future__ import annotations

from jaxserve.scheduler.batch import ScheduleBatch


class RecvSkipper:
    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._count = interval

    @property
    def is_due(self) -> bool:
        return self._count >= self._interval

    def received(self) -> None:
        self._count = 0

    def round_ended(self, launched: ScheduleBatch | None) -> None:
        is_decode = launched is not None and not launched.items
        self._count += 1 if is_decode else self._interval
