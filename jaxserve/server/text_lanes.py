"""Where work on texts is done: short ones on the event loop, long ones in threads, very long ones in threads of their own.

Tokenizing and rendering take time in proportion to a text. Nobody's stream should wait for that, and nobody's short text for
somebody's long one, so there are two lanes with a few threads each. Knows no tokenizer; it is told how long a text is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxserve.host_memory import give_back_memory

T = TypeVar("T")

# Text up to this length is worked on on the loop (well under a millisecond), which is faster than waking a thread.
INLINE_CHARS = 2000
# What goes to the lane for long texts, which takes tenths of a second and more.
LONG_CHARS = 256 * 1024
_SHORT_THREADS = 2
_MOST_LONG_THREADS = 8
# A number in a reply, such as a logprob, takes about as long to write as so many characters to tokenize.
CHARS_PER_NUMBER = 10
# After so much text, freed memory is given back to the system.
_TRIM_CHARS = 1024 * 1024


class TextLanes:
    def __init__(self) -> None:
        self._short = concurrent.futures.ThreadPoolExecutor(_SHORT_THREADS, "text")
        num_long = max(1, min(_MOST_LONG_THREADS, (os.cpu_count() or 1) // 2))
        self._long = concurrent.futures.ThreadPoolExecutor(num_long, "long text")

    def close(self) -> None:
        """What has not begun is dropped; threads end when they are done."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; it deals with so many characters."""
        if num_chars <= INLINE_CHARS:
            return work()
        return (await self.run_all(num_chars, [work]))[0]

    async def run_all(self, num_chars: int, works: Sequence[Callable[[], T]]) -> list[T]:
        """The same for parts, of so many characters in all: several may run at once, others' in between. If one raises, those
        that have not begun are dropped."""
        lane = self._short if num_chars <= LONG_CHARS else self._long
        futures = [asyncio.get_running_loop().run_in_executor(lane, work) for work in works]
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()
            if num_chars > _TRIM_CHARS:
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._long.submit(give_back_memory)
