"""StageClock: what the scheduler's thread spends its time on. It is always in one stage; whoever begins another says so."""

from __future__ import annotations

import enum
import time


class Stage(enum.IntEnum):
    IDLE = 0  # waits for messages with nothing to do
    RECEIVE = 1  # takes in messages
    SCHEDULE = 2  # plans the next step
    LAUNCH = 3  # starts it
    WAIT = 4  # for the device
    PROCESS = 5  # takes in results


class StageClock:
    __slots__ = ("_since_s", "_stage", "seconds")

    def __init__(self) -> None:
        self.seconds = [0.0] * len(Stage)  # without the stage that goes on
        self._stage: int = Stage.IDLE
        self._since_s = time.perf_counter()

    def enter(self, stage: Stage) -> None:
        now_s = time.perf_counter()
        self.seconds[self._stage] += now_s - self._since_s
        self._stage, self._since_s = stage, now_s


class NoStageClock(StageClock):
    """Where nobody wants to know."""

    __slots__ = ()

    def enter(self, stage: Stage) -> None:
        pass
