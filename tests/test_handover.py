"""What is left under a number is there until it is dropped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.handover import Handover


def test_what_is_left_stays_until_it_is_dropped() -> None:
    handover, value = Handover(), object()
    number = handover.leave(value)
    assert handover.peek(number) is value and len(handover) == 1
    assert handover.peek(number) is value
    for _ in range(2):
        handover.drop(number)
    assert len(handover) == 0
    with pytest.raises(KeyError):
        handover.peek(number)
    assert handover.leave(value) != number


def test_many_threads() -> None:
    handover = Handover()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(handover.leave, range(1000)))
        assert list(pool.map(handover.peek, numbers)) == list(range(1000))
        list(pool.map(handover.drop, numbers))
    assert len(set(numbers)) == 1000 and len(handover) == 0
