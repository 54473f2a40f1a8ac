"""How a serving process treats Python's garbage collector, which stops it to look at every object that may be in a cycle."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Net new objects between two collections of the youngest, and how many of those make one of the middle and of the oldest.
# Python's 700 are reached within a step of a large batch.
_THRESHOLDS = (20_000, 20, 50)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports that make many objects: none of them is garbage, and none is looked at from then on."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle_garbage_collector(*, collect_first: bool = True) -> None:
    """Call it once the process is ready: what start-up left lives as long as the process, so it is never looked at again, and
    what requests leave in cycles is looked for less often. For processes that are ours from start to end."""
    if collect_first:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
