"""How much of a cached prefix can be gone on from, where layers with windows need some of their pages and not others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def usable_pages(present: Sequence[np.ndarray], needed: Sequence[int]) -> int:
    """The most pages n of a prefix such that the last min(n, needed[g]) of its first n pages are there for every group g.

    present[g] bool [pages of the prefix]. With nothing there the answer is 0: a sequence can always begin.
    """
    count = np.arange(len(present[0]) + 1)
    usable = np.ones(len(count), bool)
    for there, most in zip(present, needed, strict=True):
        last_gap = np.maximum.accumulate(np.where(there, 0, count[1:]))  # counted from 1; 0: none so far
        usable[1:] &= count[1:] - last_gap >= np.minimum(count[1:], most)
    return int(np.flatnonzero(usable)[-1])
