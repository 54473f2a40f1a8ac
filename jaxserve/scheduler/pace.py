"""Pace: whether the next step may be launched now. Not while generation is paused or a command holds it, and when slowed down
not before its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

# What becomes of the running requests when generation is paused.
PauseMode = Literal["abort", "retract", "in_place"]


class Pace:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paused_since_s: float | None = None
        self._last_launch_s = float("-inf")
        self.forward_sleep_s = 0.0  # least time between two launches
        self.is_held = False  # by a command to the runner, or because memory is released
        self.awaits_profile = False  # one trace is being completed, and another one follows

    @property
    def is_paused(self) -> bool:
        return self._paused_since_s is not None

    @property
    def is_stopped(self) -> bool:
        """For how long, time does not say."""
        return self.is_paused or self.is_held or self.awaits_profile

    def counts(self) -> dict[str, float | None]:
        return {"is_paused": self.is_paused, "forward_sleep_time": self.forward_sleep_s or None}

    @property
    def wait_s(self) -> float:
        """Until the next launch, unless it is stopped; 0: now."""
        if not self.forward_sleep_s:
            return 0.0
        return max(0.0, self._last_launch_s + self.forward_sleep_s - self._clock())

    @property
    def may_launch(self) -> bool:
        return not self.is_stopped and not self.wait_s

    def launched(self) -> None:
        if self.forward_sleep_s:
            self._last_launch_s = self._clock()

    def pause(self) -> None:
        if self._paused_since_s is None:
            self._paused_since_s = self._clock()

    def resume(self) -> float | None:
        """Since when it was paused; None if it was not."""
        since_s, self._paused_since_s = self._paused_since_s, None
        return since_s
