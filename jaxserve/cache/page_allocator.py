"""Which KV pages are free, and who owns the others.

Knows page numbers only: not tokens, requests or device arrays. A page goes FREE -> LEASED (alloc), LEASED -> TREE
(give_to_tree) and back to FREE from either (free). Every transition checks the owner it expects, so that a double free or a
page that is both leased and cached stops where it happens and not in another request's answer.
"""

from __future__ import annotations

import enum

import numpy as np

NO_PAGE = -1


class PageOwner(enum.IntEnum):
    FREE = 0
    LEASED = 1  # exactly one request row holds it
    TREE = 2  # a node of the radix tree holds it; any number of rows may read it


class FreeStack:
    """Free page numbers. Taking and putting back cost the pages moved and nothing else."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, f"a KV cache needs at least one page, got {num_pages}"
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the top, at num_free - 1, is page 0
        self.num_free = num_pages

    def free_pages(self) -> np.ndarray:
        """The free pages, for audits."""
        return self._stack[: self.num_free].copy()

    def _pop(self, count: int) -> np.ndarray:
        assert 0 <= count <= self.num_free, f"{count} pages asked of {self.num_free} free ones"
        start = self.num_free - count
        pages = self._stack[start : self.num_free][::-1].copy()
        self.num_free = start
        return pages

    def _push(self, pages: np.ndarray) -> None:
        end = self.num_free + len(pages)
        self._stack[self.num_free : end] = pages[::-1]
        self.num_free = end

    def _check_room(self, pages: np.ndarray) -> None:
        assert self.num_free + len(pages) <= self.num_pages, (
            f"{len(pages)} pages freed with {self.num_free} of {self.num_pages} free already"
        )

    def _restart(self, is_used: np.ndarray) -> None:
        """bool [num_pages]; the others are free."""
        free = np.flatnonzero(~is_used).astype(np.int32)
        self.num_free = len(free)
        self._stack[: self.num_free] = free[::-1]


class PageAllocator(FreeStack):
    """The pages of the KV group that keeps every token."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.owner = np.zeros(num_pages, np.uint8)

    def alloc(self, count: int) -> np.ndarray:
        """`count` free pages, int32, now LEASED. The caller has checked num_free."""
        pages = self._pop(count)
        self._move(pages, PageOwner.FREE, PageOwner.LEASED)
        return pages

    def give_to_tree(self, pages: np.ndarray) -> None:
        self._move(pages, PageOwner.LEASED, PageOwner.TREE)

    def free(self, pages: np.ndarray, owner: PageOwner) -> None:
        """Takes pages back from their owner."""
        self._check_room(pages)
        self._move(pages, owner, PageOwner.FREE)
        self._push(pages)

    def rebuild(self, tree_pages: np.ndarray) -> None:
        """Makes the tree's pages the only ones in use, whatever the books said before."""
        self.owner[:] = PageOwner.FREE
        self.owner[tree_pages] = PageOwner.TREE
        self._restart(self.owner != PageOwner.FREE)

    def _move(self, pages: np.ndarray, old: PageOwner, new: PageOwner) -> None:
        owner = self.owner[pages]
        if not (owner == old).all():
            wrong = pages[owner != old][:8].tolist()
            raise AssertionError(
                f"pages {wrong} move from {old.name} to {new.name} but belong to {owner[owner != old][:8].tolist()}"
            )
        self.owner[pages] = new


class NoPages:
    """In place of a PageAllocator where every layer has a window: tokens have no page that lasts as long as they do."""

    num_pages = 0
    num_free = 1 << 62

    def alloc(self, count: int) -> np.ndarray:
        return np.full(count, NO_PAGE, np.int32)

    def give_to_tree(self, pages: np.ndarray) -> None:
        pass

    def free(self, pages: np.ndarray, owner: PageOwner) -> None:
        pass

    def rebuild(self, tree_pages: np.ndarray) -> None:
        pass
