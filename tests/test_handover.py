"""What is left under a number is there until it is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.handover import Handover


def test_what_is_left_is_taken_once() -> None:
    handover, value = Handover(), object()
    number = handover.leave(value)
    assert handover.peek(number) is value and len(handover) == 1
    assert handover.take(number) is value and len(handover) == 0
    for find in (handover.peek, handover.take):
        with pytest.raises(KeyError):
            find(number)
    handover.drop(number)
    assert handover.leave(value) != number


def test_many_threads() -> None:
    handover = Handover()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(handover.leave, range(1000)))
        assert list(pool.map(handover.take, numbers)) == list(range(1000))
    assert len(set(numbers)) == 1000 and len(handover) == 0
