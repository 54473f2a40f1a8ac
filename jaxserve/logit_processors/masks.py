"""What the built-in processors rule out, as functions of the tokens so far. NumPy only."""

from __future__ import annotations

import numpy as np


def repeating_tokens(ids: np.ndarray, ngram_size: int, window_size: int) -> np.ndarray:
    """int [B], distinct: what would end an n-gram that lies within the last `window_size` of `ids` (int [T]) already."""
    window = ids[max(len(ids) - window_size, 0) :]
    if ngram_size > len(ids) or len(window) < ngram_size:
        return window[:0]
    ends = window[ngram_size - 1 :]
    matches = np.ones(len(ends), bool)
    for back in range(1, ngram_size):
        matches &= window[ngram_size - 1 - back : len(window) - back] == ids[len(ids) - back]
    return np.unique(ends[matches])
