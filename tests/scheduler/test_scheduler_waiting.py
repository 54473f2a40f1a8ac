"""The waiting queue: order, limit, displacement, token count."""

from __future__ import annotations

import itertools

import numpy as np

from jaxserve.scheduler.req import Req, RequestState
from jaxserve.scheduler.waiting import WaitingQueue
from jaxserve.types import SamplingParams

_arrivals = itertools.count()


def make_req(rid: str, urgency: int = 0, length: int = 4) -> Req:
    prompt = np.ones(length, np.int32)
    return Req(
        rid=rid,
        prompt_ids=prompt,
        sampling=SamplingParams(),
        seed=0,
        max_new_tokens=4,
        urgency=urgency,
        arrival=next(_arrivals),
    )


def rids(queue: WaitingQueue) -> str:
    return "".join(req.rid for req in queue)


def test_order_and_tokens() -> None:
    queue = WaitingQueue(None, False)
    a, b, c = make_req("a"), make_req("b", length=6), make_req("c")
    for req in (a, b, c):
        assert queue.push(req) is None
    assert rids(queue) == "abc" and queue.pending_tokens == 14
    queue.remove([b])
    assert rids(queue) == "ac" and queue.pending_tokens == 8
    a.move_to(RequestState.PREFILL)
    queue.drop_admitted([a])
    assert rids(queue) == "c" and queue.pending_tokens == 4


def test_retracted_requests_go_to_the_front_in_order_of_arrival() -> None:
    queue = WaitingQueue(None, False)
    a, b, c = make_req("a"), make_req("b"), make_req("c")
    queue.push(c)
    b.output_ids = np.ones(3, np.int32)
    queue.push_front([b, a])
    assert rids(queue) == "abc" and queue.pending_tokens == 15


def test_a_full_queue_refuses_the_newcomer() -> None:
    queue = WaitingQueue(1, False)
    assert queue.push(make_req("a")) is None
    late = make_req("b", urgency=9)
    assert queue.push(late) is late
    assert rids(queue) == "a"


def test_a_full_queue_gives_up_its_least_urgent_and_latest() -> None:
    queue = WaitingQueue(3, True)
    for rid, urgency in (("a", 1), ("b", 0), ("c", 0)):
        queue.push(make_req(rid, urgency))
    displaced = queue.push(make_req("d", 5))
    assert displaced is not None and displaced.rid == "c"
    assert rids(queue) == "abd"
    same = make_req("e", 0)
    assert queue.push(same) is same


def test_a_retracted_request_is_not_displaced() -> None:
    queue = WaitingQueue(2, True)
    old = make_req("a", urgency=-5)
    old.num_retractions = 1
    queue.push_front([old])
    queue.push(make_req("b"))
    displaced = queue.push(make_req("c", 5))
    assert displaced is not None and displaced.rid == "b"
