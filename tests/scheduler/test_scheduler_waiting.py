"""The waiting queue: order, limit, token count."""

from __future__ import annotations

import itertools
import time

import numpy as np

from jaxserve.scheduler.req import Req, RequestState
from jaxserve.scheduler.waiting import WaitingQueue
from jaxserve.timeline import RequestTimes
from jaxserve.types import SamplingParams

_arrivals = itertools.count()


def make_req(rid: str, urgency: int = 0, length: int = 4, num_retractions: int = 0) -> Req:
    prompt = np.ones(length, np.int32)
    return Req(
        rid=rid,
        prompt_ids=prompt,
        sampling=SamplingParams(),
        seed=0,
        max_new_tokens=4,
        urgency=urgency,
        arrival=next(_arrivals),
        times=RequestTimes(num_retractions=num_retractions),
    )


def rids(queue: WaitingQueue) -> str:
    return "".join(req.rid for req in queue)


def test_order_and_tokens() -> None:
    queue = WaitingQueue(max_len=None, evicts_by_priority=False)
    a, b, c = make_req("a"), make_req("b", length=6), make_req("c")
    for req in (a, b, c):
        queue.push(req)
    assert rids(queue) == "abc" and queue.pending_tokens == 14
    queue.remove([b])
    assert rids(queue) == "ac" and queue.pending_tokens == 8
    a.move_to(RequestState.PREFILL)
    queue.drop_admitted([a])
    assert rids(queue) == "c" and queue.pending_tokens == 4


def test_retracted_requests_go_to_the_front_in_order_of_arrival() -> None:
    queue = WaitingQueue(max_len=None, evicts_by_priority=False)
    a, b, c = (make_req(rid, num_retractions=1) for rid in "abc")
    b.output_ids = np.ones(3, np.int32)
    queue.push(make_req("d"))
    queue.push_front([c, a])
    queue.push_front([b])  # one at a time makes no difference
    assert rids(queue) == "abcd" and queue.pending_tokens == 19


def test_a_full_queue_refuses_the_newcomer() -> None:
    queue = WaitingQueue(max_len=1, evicts_by_priority=False)
    first, late, latest = make_req("a"), make_req("b", urgency=9), make_req("c")
    for req in (first, late, latest):
        queue.push(req)
    assert queue.beyond_limit() == [latest, late]
    assert queue.beyond_limit(not_counted=[late]) == [latest]
    assert rids(queue) == "abc"  # the caller ends them


def test_a_full_queue_gives_up_its_least_urgent_and_latest() -> None:
    queue = WaitingQueue(max_len=3, evicts_by_priority=True)
    for rid, urgency in (("a", 1), ("b", 0), ("c", 0), ("d", 5)):
        queue.push(make_req(rid, urgency))
    assert [req.rid for req in queue.beyond_limit()] == ["c"]
    queue.push(make_req("e", 0))
    assert [req.rid for req in queue.beyond_limit()] == ["e", "c"]


def test_a_retracted_request_does_not_count() -> None:
    queue = WaitingQueue(max_len=1, evicts_by_priority=True)
    queue.push_front([make_req("a", urgency=-5, num_retractions=1)])
    queue.push(make_req("b"))
    assert queue.beyond_limit() == []
    queue.push(make_req("c", 5))
    assert [req.rid for req in queue.beyond_limit()] == ["b"]


def test_no_limit() -> None:
    queue = WaitingQueue(max_len=None, evicts_by_priority=True)
    queue.push(make_req("a"))
    assert queue.beyond_limit() == []


def cost_of_leaving(num_waiting: int) -> float:
    """CPU seconds that 500 requests, one by one, need to leave a queue of so many."""
    queue = WaitingQueue(max_len=None, evicts_by_priority=False)
    reqs = [make_req(str(i)) for i in range(num_waiting)]
    for req in reqs:
        queue.push(req)
    started_s = time.process_time()
    for req in reqs[num_waiting // 2 :][:500]:
        queue.remove([req])
    return time.process_time() - started_s


def test_leaving_costs_the_same_however_many_wait() -> None:
    short, long = (min(cost_of_leaving(count) for _ in range(3)) for count in (1000, 30_000))
    assert long < 8 * short, f"{long:.4f} s instead of {short:.4f} s"


def test_only_the_first_of_a_long_queue_are_looked_at() -> None:
    queue = WaitingQueue(max_len=None, evicts_by_priority=False)
    queue.push_front([make_req("a", num_retractions=1)])
    for rid in "bcd":
        queue.push(make_req(rid))
    assert [req.rid for req in queue.admissible(3)] == ["a", "b", "c"]
    queue.only_begun = True
    assert [req.rid for req in queue.admissible()] == ["a"]
