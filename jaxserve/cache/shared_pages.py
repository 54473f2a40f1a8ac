"""Pages that rows and the tree hold independently of each other, counted one by one; free when nobody wants them.

"Held" means that some row's next step may read them. Knows no tokens.
"""

from __future__ import annotations

import numpy as np

from jaxserve.cache.page_allocator import FreeStack


class SharedPages(FreeStack):
    def __init__(self, num_pages: int, name: str) -> None:
        """`name`: of the pages, for reports."""
        super().__init__(num_pages)
        self.name = name
        self.holds = np.zeros(self.num_pages, np.int32)  # rows that hold the page
        self.in_tree = np.zeros(self.num_pages, bool)
        self.num_evictable = 0  # in the tree, held by nobody

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_evictable

    def give_to_tree(self, pages: np.ndarray) -> None:
        """Of pages that a row holds."""
        assert (self.holds[pages] > 0).all() and not self.in_tree[pages].any(), f"pages given to the tree: {pages[:8].tolist()}"
        self.in_tree[pages] = True

    def take_from_tree(self, pages: np.ndarray) -> None:
        assert self.in_tree[pages].all(), f"pages taken from a tree that has not all of them: {pages[:8].tolist()}"
        self.in_tree[pages] = False
        free = pages[self.holds[pages] == 0]
        self.num_evictable -= len(free)
        self._push(free)

    def is_held(self, pages: np.ndarray) -> np.ndarray:
        return self.holds[pages] > 0

    def rebuild(self, tree_pages: np.ndarray) -> None:
        """Makes the tree's pages the only ones in use, and nobody holds any, whatever the books said before."""
        self.holds[:] = 0
        self.in_tree[:] = False
        self.in_tree[tree_pages] = True
        self.num_evictable = len(tree_pages)
        self._restart(self.in_tree)

    def _hold(self, pages: np.ndarray) -> None:
        """Of the tree's pages, each once."""
        self.num_evictable -= int((self.holds[pages] == 0).sum())
        self.holds[pages] += 1

    def _drop(self, pages: np.ndarray) -> None:
        """One hold of each is given up; a page may occur more than once, held by several rows."""
        np.subtract.at(self.holds, pages, 1)
        left = np.unique(pages[self.holds[pages] == 0])
        in_tree = self.in_tree[left]
        self.num_evictable += int(in_tree.sum())
        self._push(left[~in_tree])
