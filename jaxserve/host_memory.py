"""The memory of this process, as the system counts it."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_memory() -> None:
    """Has the C library return freed memory to the system, if it is one that keeps it otherwise (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
