"""StageClock: what the scheduler's thread spends its time on. It is always in one stage; whoever begins another says so.

The seconds of each are metrics. While a trace is taken, its stages stand in it under the same names.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxserve.scheduler.batch import ScheduleBatch
from jaxserve.types import ForwardMode

KINDS = {ForwardMode.DECODE: "decode", ForwardMode.EXTEND: "prefill", ForwardMode.MIXED: "mixed"}  # of steps
_NOTHING = contextlib.nullcontext()


class Stage(enum.IntEnum):
    IDLE = 0  # waits for messages with nothing to do
    RECEIVE = 1  # takes in messages
    SCHEDULE = 2  # plans the next step
    LAUNCH = 3  # starts it
    WAIT = 4  # for the device
    PROCESS = 5  # takes in results


class StageClock:
    __slots__ = ("_annotate", "_counts", "_shown", "_since_s", "_stage", "seconds")

    def __init__(self, annotate: Callable[..., AbstractContextManager[Any]], *, counts: bool = True) -> None:
        """`annotate`: as of the Runner. `counts`: somebody wants the seconds."""
        self._annotate = annotate
        self._counts = counts
        self._shown: AbstractContextManager[Any] | None = None  # the stage in the trace that is taken
        self.seconds = [0.0] * len(Stage)  # without the stage that goes on
        self._stage = Stage.IDLE
        self._since_s = time.perf_counter()

    def enter(self, stage: Stage) -> None:
        if self._counts:
            now_s = time.perf_counter()
            self.seconds[self._stage] += now_s - self._since_s
            self._since_s = now_s
        self._stage = stage
        if self._shown is not None:
            self.show()

    def show(self) -> None:
        """The stage, in the trace that is taken from now on."""
        self.hide()
        self._shown = self._annotate(self._stage.name.lower())
        self._shown.__enter__()

    def hide(self) -> None:
        """No trace is taken any more."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Around something within a stage that is to stand in a trace."""
        return _NOTHING if self._shown is None else self._annotate(name)

    def launch(self, number: int, batch: ScheduleBatch) -> AbstractContextManager[Any]:
        """Around the launch of the `number`-th step since the start."""
        if self._shown is None:
            return _NOTHING
        tokens = len(batch.decode_rows) + batch.num_prefill_tokens
        return self._annotate(f"launch {KINDS[batch.mode]}", step_num=number, rows=len(batch.rows), tokens=tokens)
