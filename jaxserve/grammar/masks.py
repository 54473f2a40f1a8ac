"""The masks of a batch, filled by several threads at a time. The layout of a mask is in `bits`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from jaxserve.grammar.matcher import Matcher

_MOST_THREADS = 8


class MaskFiller:
    """Fills the masks of a batch, several matchers at a time. The GIL is free meanwhile."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._executor = LLExecutor(num_threads or min(os.cpu_count() or 1, _MOST_THREADS))

    def fill(self, matchers: Sequence[Matcher], rows: Iterable[int], out: np.ndarray) -> None:
        """Writes the mask of `matchers[i]` into `out[rows[i]]`, int32 [R, words] and C-contiguous; other rows stay.

        A matcher may find out here that its grammar is too complex to go on: see `Matcher.error`.
        """
        places = list(zip(matchers, rows, strict=True))
        if len(places) > 1:
            fill_next_token_bitmask_par(self._executor, [(matcher.state, row) for matcher, row in places], out)
            for matcher, row in places:
                matcher.finish_mask(out[row])
        elif places:
            matcher, row = places[0]
            matcher.fill_mask(out[row])
