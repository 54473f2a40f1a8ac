"""Token masks: one bit per token of the vocabulary, packed into int32 words.

Token t is bit t % 32 (least significant first) of word t // 32; a set bit means that the token may come next. Bits beyond the
vocabulary are unset, except in rows without a grammar, where all bits are set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from jaxserve.grammar.matcher import Matcher

_MOST_THREADS = 8


def mask_words(vocab_size: int) -> int:
    """Words of one mask."""
    return -(-vocab_size // 32)


def allow_all(rows: int, vocab_size: int) -> np.ndarray:
    """int32 [rows, words], every token allowed: the buffer to fill."""
    return np.full((rows, mask_words(vocab_size)), -1, np.int32)


class MaskFiller:
    """Fills the masks of a batch, several matchers at a time. The GIL is free meanwhile."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._executor = LLExecutor(num_threads or min(os.cpu_count() or 1, _MOST_THREADS))

    def fill(self, matchers: Sequence[Matcher], rows: Iterable[int], out: np.ndarray) -> None:
        """Writes the mask of `matchers[i]` into `out[rows[i]]`, int32 [R, words] and C-contiguous; other rows stay.

        A matcher may find out here that its grammar is too complex to go on: see `Matcher.error`.
        """
        places = list(zip(matchers, rows, strict=True))
        if len(places) == 1:
            matcher, row = places[0]
            return matcher.fill_mask(out[row])
        fill_next_token_bitmask_par(self._executor, [(matcher.state, row) for matcher, row in places], out)
        for matcher, row in places:
            matcher.finish_mask(out[row])
        return None
