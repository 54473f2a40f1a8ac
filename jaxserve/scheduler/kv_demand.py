"""KVDemand: an estimate of the KV that admitted requests may come to need, and whether one more leaves them room.

Of the KV group that keeps all tokens counts what they need beyond the pages they hold, against what is free or evictable; so
shared prefixes count once. Of a group with a window counts what each holds at a time, against the whole pool.
"""

from __future__ import annotations

import numpy as np

from jaxserve.cache.manager import CacheManager


class KVDemand:
    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._tokens = 0
        self._in_windows = [0] * len(cache.windows)

    def add(self, held: int, length: int) -> None:
        """A request that holds KV of `held` tokens and may grow to `length`."""
        self._tokens += length - held
        for index, group in enumerate(self._cache.windows):
            self._in_windows[index] += int(group.kept_tokens(length))

    def add_all(self, held: np.ndarray, lengths: np.ndarray) -> None:
        """The same for many."""
        self._tokens += int((lengths - held).sum())
        for index, group in enumerate(self._cache.windows):
            self._in_windows[index] += int(group.kept_tokens(lengths).sum())

    def leaves_room(self, *, held: int, fill_len: int, length: int, step_tokens: int) -> bool:
        """For a request that would hold `held` tokens of the tree, computes up to `fill_len` in steps of at most `step_tokens`
        and then grows to `length`."""
        cache = self._cache
        if cache.keeps_all and not length - held + cache.page_size < cache.available_tokens - self._tokens:
            return False
        for in_use, group in zip(self._in_windows, cache.windows, strict=True):
            while_filling = min(fill_len, int(group.kept_tokens(fill_len)) + step_tokens)
            if in_use + max(while_filling, int(group.kept_tokens(length))) > group.num_pages * cache.page_size:
                return False
        return True
