"""Long texts in threads of their own: who waits for whom."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from jaxserve.server.text_lanes import INLINE_CHARS, LONG_CHARS, TextLanes


async def test_a_short_text_stays_on_the_loop() -> None:
    assert await TextLanes().run(INLINE_CHARS, threading.get_ident) == threading.get_ident()
    assert await TextLanes().run(INLINE_CHARS + 1, threading.get_ident) != threading.get_ident()


async def test_a_shorter_text_does_not_wait_for_long_ones_and_threads_are_few() -> None:
    lanes, may_end = TextLanes(), threading.Event()
    threads: set[int] = set()

    def take_long() -> None:
        threads.add(threading.get_ident())
        may_end.wait(10)

    long = [asyncio.create_task(lanes.run(LONG_CHARS + 1, take_long)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(lanes.run(INLINE_CHARS + 1, lambda: "done"), 5) == "done"
    assert not any(task.done() for task in long)
    may_end.set()
    await asyncio.gather(*long)
    assert len(threads) <= 8


async def test_when_one_part_fails_the_rest_is_dropped() -> None:
    lanes, begun = TextLanes(), []

    def work(index: int) -> None:
        begun.append(index)
        time.sleep(0.005)
        raise ValueError(f"part {index}")

    with pytest.raises(ValueError, match="part 0"):
        await lanes.run_all(LONG_CHARS + 1, [lambda index=index: work(index) for index in range(1000)])
    await lanes.run(LONG_CHARS + 1, lambda: None)
    assert len(begun) < 1000
