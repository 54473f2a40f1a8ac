"""A runner that serves while programs are still being compiled."""

from __future__ import annotations

from scheduler_harness import Harness, prompt_of

from jaxserve.messages import WorkerProgress
from jaxserve.scheduler.time_limits import TIMER_INTERVAL_S


def progress(harness: Harness) -> list[int]:
    return [message.programs_missing for message in harness.transport.replies if isinstance(message, WorkerProgress)]


def test_the_main_process_is_told_what_is_missing() -> None:
    harness = Harness()
    harness.runner.programs_missing = 3
    harness.turn(3)
    assert progress(harness) == [3], "once"
    harness.submit(prompt_of(5))
    harness.turn(2)
    harness.runner.programs_missing = 1
    harness.turn(2)
    assert progress(harness) == [3, 1], "also while a request runs"
    harness.run()
    harness.close()


def test_an_idle_loop_looks_until_all_is_there() -> None:
    harness = Harness()
    harness.runner.programs_missing = 1
    harness.turn(3)
    assert harness.scheduler.is_idle and harness.scheduler.wait_s == TIMER_INTERVAL_S
    harness.runner.programs_missing = 0
    harness.turn()
    assert progress(harness) == [1, 0]
    assert harness.scheduler.wait_s is None
    harness.close()


def test_a_warm_runner_sends_nothing() -> None:
    harness = Harness()
    harness.submit(prompt_of(5))
    harness.run()
    assert progress(harness) == []
    harness.close()
