"""The watchdog: silent while work goes on, one clear call when a piece of work hangs."""

from __future__ import annotations

import threading
import time

from jaxserve.scheduler.watchdog import Watchdog


def test_a_hanging_step_is_reported_once() -> None:
    fired = threading.Event()
    messages: list[str] = []

    def on_timeout(message: str) -> None:
        messages.append(message)
        fired.set()

    watchdog = Watchdog(0.1, on_timeout)
    watchdog.start()
    with watchdog.working():
        assert fired.wait(10)
    watchdog.stop()
    assert messages == ["One scheduler step took longer than 0.1 s (--watchdog-timeout); giving up."]


def test_many_short_steps_and_long_pauses_are_fine() -> None:
    messages: list[str] = []
    watchdog = Watchdog(0.5, messages.append)
    watchdog.start()
    for _ in range(20):
        with watchdog.working():
            pass
    time.sleep(0.8)  # waiting for requests is not work
    watchdog.stop()
    assert messages == []


def test_a_soft_limit_tells_once_of_each_piece_of_work() -> None:
    ended: list[str] = []
    told: list[int] = []
    watchdog = Watchdog(30, ended.append, soft_timeout_s=0.05, on_soft_timeout=lambda: told.append(1))
    watchdog.start()
    for _ in range(2):
        with watchdog.working():
            time.sleep(0.5)
    with watchdog.working():
        pass
    watchdog.stop()
    assert (len(told), ended) == (2, [])
