"""The pages of a run of tokens, in all KV groups at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.cache.page_allocator import NO_PAGE
from jaxserve.cache.tree_node import TreeNode

NO_PAGES = np.zeros(0, np.int32)
NO_PAGES.flags.writeable = False


class RunPages(NamedTuple):
    """The pages of a run of tokens. Windows' may be NO_PAGE; of pages that only change hands, just those there are."""

    pages: np.ndarray  # int32
    windows: tuple[np.ndarray, ...] = ()  # int32, for each KV group with a window

    def part(self, part: slice) -> RunPages:
        """A copy: a view would keep the whole run in memory after the rest is gone."""
        return RunPages(self.pages[part].astype(np.int32), tuple(window[part].astype(np.int32) for window in self.windows))


_NOTHING = RunPages(NO_PAGES)


class PageCollector:
    """Pages that the tree gives up."""

    def __init__(self, num_windows: int) -> None:
        self.num_pages = 0
        self._pages: list[np.ndarray] = []
        self._windows: list[list[np.ndarray]] = [[] for _ in range(num_windows)]

    def add(self, pages: np.ndarray) -> None:
        self.num_pages += len(pages)
        self._pages.append(pages)

    def add_window(self, group: int, pages: np.ndarray) -> None:
        self._windows[group].append(pages)

    def add_run(self, run: RunPages) -> None:
        self.add(run.pages)
        for group, window in enumerate(run.windows):
            self.add_window(group, present(window))

    def take_windows(self, node: TreeNode) -> None:
        for group, window in enumerate(node.windows):
            self.add_window(group, present(window))
            window[:] = NO_PAGE

    def result(self) -> RunPages:
        if not self._pages and not self._windows:
            return _NOTHING
        return RunPages(concatenate(self._pages), tuple(map(concatenate, self._windows)))


def present(window: np.ndarray) -> np.ndarray:
    return window[window != NO_PAGE]


def concatenate(pages: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pages) if pages else NO_PAGES
