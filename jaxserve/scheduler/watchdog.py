"""Watchdog: ends a process whose work hangs, with a clear message, instead of leaving its clients to wait for ever.

The loop says when it begins a piece of work and when it is done (`working`); a thread looks whether the current piece has taken
longer than the limit. Waiting for requests is not work. What "end" means is the caller's choice.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class Watchdog:
    def __init__(
        self,
        timeout_s: float,
        on_timeout: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        soft_timeout_s: float | None = None,
        on_soft_timeout: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_timeout` is called once, in the watchdog's thread, with one sentence; `on_soft_timeout` for each piece of work
        that takes longer than `soft_timeout_s`, which goes on."""
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._soft_timeout_s = math.inf if soft_timeout_s is None else soft_timeout_s
        self._on_soft_timeout = on_soft_timeout
        self._clock = clock
        self._began_s: float | None = None  # when the current piece of work began; None between two
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """May be called if it was never started."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self._began_s = self._clock()
        try:
            yield
        finally:
            self._began_s = None

    def _watch(self) -> None:
        told_s: float | None = None  # when the piece of work began that was told of last
        while not self._stop.wait(min(self._timeout_s / 4, self._soft_timeout_s / 4, 1.0)):
            began_s = self._began_s
            if began_s is None:
                continue
            if began_s != told_s and self._clock() - began_s > self._soft_timeout_s:
                told_s = began_s
                logger.warning("One scheduler step takes longer than %g s (--soft-watchdog-timeout).", self._soft_timeout_s)
                self._on_soft_timeout()
            if self._clock() - began_s > self._timeout_s:
                message = f"One scheduler step took longer than {self._timeout_s:g} s (--watchdog-timeout); giving up."
                logger.critical(message)
                self._on_timeout(message)
                return
