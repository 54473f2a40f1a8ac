"""Handover: where one part of a process leaves an object for another one, which is told only a number, as in a message.

For what no message can carry, such as arrays that are on a device. Knows nothing of what is left.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any


class Handover:
    """For use by any thread. A number is never used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._left: dict[int, Any] = {}

    def leave(self, value: Any) -> int:
        """Keeps `value` until it is dropped; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._left[number] = value
            return number

    def peek(self, number: int) -> Any:
        """What was left, which stays. KeyError if nothing is there under that number."""
        with self._lock:
            return self._left[number]

    def drop(self, number: int) -> None:
        """It is kept no longer, if it is still there."""
        with self._lock:
            self._left.pop(number, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._left)
