"""Priority scheduling: order, preemption of running requests, thresholds and switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.types import FinishReason

ON = {"enable_priority_scheduling": True}


def finish_order(harness: Harness) -> list[str]:
    ended = [(answer.times.finished_s, rid) for rid, answer in harness.transport.answers.items() if answer.times]
    return [rid for _, rid in sorted(ended)]


@pytest.mark.parametrize("args", [ON, {"schedule_policy": "priority"}])
def test_urgent_requests_overtake_waiting_ones(make_harness: Callable[..., Harness], args: dict[str, Any]) -> None:
    harness = make_harness(args, max_rows=1)
    for rid, priority in (("low", 1), ("none", None), ("high", 5)):
        harness.submit(prompt_of(5), max_new=2, rid=rid, priority=priority, ignore_eos=True)
    harness.run()
    assert finish_order(harness) == ["high", "low", "none"]


def test_low_values_first(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(ON | {"schedule_low_priority_values_first": True}, max_rows=1)
    for rid, priority in (("low", 1), ("none", None), ("high", 5)):
        harness.submit(prompt_of(5), max_new=2, rid=rid, priority=priority, ignore_eos=True)
    harness.run()
    assert finish_order(harness) == ["low", "high", "none"]


def test_default_priority(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(ON | {"default_priority_value": 3}, max_rows=1)
    for rid, priority in (("low", 1), ("none", None), ("high", 5)):
        harness.submit(prompt_of(5), max_new=2, rid=rid, priority=priority, ignore_eos=True)
    harness.run()
    assert finish_order(harness) == ["high", "none", "low"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("scarce", ["rows", "pages"])
def test_a_running_request_is_preempted(make_harness: Callable[..., Harness], scarce: str, overlap: bool) -> None:
    spec = {"max_rows": 2} if scarce == "rows" else {"num_pages": 100}
    harness = make_harness(ON, overlap=overlap, **spec)
    for rid in ("a", "b"):
        harness.submit(prompt_of(10, ord(rid)), max_new=30, rid=rid, priority=0, ignore_eos=True)
        harness.turn(3)
    harness.submit(prompt_of(30), max_new=20, rid="urgent", priority=20, ignore_eos=True)
    harness.run()
    harness.assert_as_expected()
    assert finish_order(harness)[0] == "urgent"
    assert harness.scheduler.internal_state()["num_preemptions"] == 1
    assert harness.answer("b").times.num_retractions == 1  # equal priority: the later one


@pytest.mark.parametrize(
    ("args", "priority"),
    [({"priority_scheduling_preemption_threshold": 20}, 20), ({"disable_priority_preemption": True}, 99), ({}, 10)],
)
def test_no_preemption(make_harness: Callable[..., Harness], args: dict[str, Any], priority: int) -> None:
    harness = make_harness(ON | args, max_rows=1)
    harness.submit(prompt_of(10), max_new=30, rid="running", priority=0, ignore_eos=True)
    harness.turn(3)
    harness.submit(prompt_of(5), max_new=2, rid="urgent", priority=priority)
    harness.run()
    assert finish_order(harness) == ["running", "urgent"]
    assert harness.scheduler.internal_state()["num_preemptions"] == 0


def test_nobody_is_preempted_for_what_would_not_fit_anyway(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(ON, num_pages=120)
    harness.submit(prompt_of(60, 1), max_new=30, rid="peer", priority=20, ignore_eos=True)
    harness.turn(3)
    harness.submit(prompt_of(5, 2), max_new=20, rid="low", priority=0, ignore_eos=True)
    harness.turn(3)
    harness.submit(prompt_of(100, 3), max_new=2, rid="big", priority=20)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_preemptions"] == 0


def test_a_full_queue_gives_up_its_least_urgent(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(ON | {"max_queued_requests": 2}, max_rows=1)
    harness.submit(prompt_of(5), 30, rid="running", priority=9, ignore_eos=True)
    harness.turn(2)
    for rid, priority in (("a", 5), ("b", 1), ("c", 7), ("d", 0)):
        harness.submit(prompt_of(5), rid=rid, priority=priority)
    harness.run()
    full = FinishReason.abort("The request queue is full.", 503, "ServiceUnavailableError")
    gave_way = FinishReason.abort("The request is aborted by a higher priority request.", 503, "ServiceUnavailableError")
    assert harness.answer("running").times.num_retractions == 0
    assert harness.answer("b").finish == gave_way and harness.answer("d").finish == full
    harness.assert_as_expected("a", "c")


def test_priorities_without_priority_scheduling(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=1)
    harness.submit(prompt_of(5), rid="a", priority=1)
    harness.submit(prompt_of(5), rid="b", priority=9)
    harness.run()
    assert finish_order(harness) == ["a", "b"]
    strict = make_harness({"abort_on_priority_when_disabled": True})
    strict.submit(prompt_of(5), rid="a", priority=1)
    strict.submit(prompt_of(5), rid="b")
    strict.run()
    finish = strict.answer("a").finish
    assert finish is not None and finish.status_code == 400 and "priority 1 was given" in (finish.message or "")
    strict.assert_as_expected("b")
