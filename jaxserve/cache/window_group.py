"""The pages of layers that see a window of the newest tokens: held by rows and by the tree, free when nobody wants them.

Unlike a page of full attention, a page here may go while the tokens it stands for are still in use: once a row's window has
moved past it, the row gives it up; the tree may give it up at any time that no row holds it. So pages are counted one by one,
and "held" means that some row's next step may read them. Knows rows and pages, but no tokens.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jaxserve.cache.page_allocator import NO_PAGE
from jaxserve.cache.req_to_token import PageTable
from jaxserve.cache.shared_pages import SharedPages
from jaxserve.runner import KVGroup


class WindowGroup(SharedPages):
    def __init__(self, group: KVGroup, page_size: int, table: PageTable, row_num_pages: np.ndarray) -> None:
        """`row_num_pages` int32 [max_rows]: pages of tokens that each row has; who grows rows keeps it."""
        assert group.window is not None
        super().__init__(group.num_pages, f" of window {group.window}")
        self.window = group.window
        self._most_kept = group.kept_tokens(sys.maxsize, page_size)
        self._page_size = page_size
        self._table = table
        self._row_num_pages = row_num_pages
        self.first_page = np.zeros_like(row_num_pages)  # a row holds its pages from here on; those before are behind its window

    def kept_tokens(self, length: Any) -> Any:
        """Most tokens whose pages a sequence of `length` (or an array of them) holds between two steps."""
        return np.minimum(length, self._most_kept)

    # --- rows

    def begin(self, row: int, pages: np.ndarray) -> None:
        """A row goes on behind a cached prefix with these pages [n]; takes those that its next token's window reaches into."""
        first = int(self._first_visible(np.array(len(pages) * self._page_size)))
        seen = pages[first:]
        assert (seen >= 0).all(), f"row {row} goes on behind {len(pages)} pages of which one in its window is gone"
        self._hold(seen)
        self.first_page[row] = first
        self._table.write(row, first, seen)

    def alloc(self, count: int) -> np.ndarray:
        """Free pages, held once from now on. The caller writes them into the table and has checked num_free."""
        pages = self._pop(count)
        self.holds[pages] = 1
        return pages

    def slide(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """The next token of rows[i], and all behind it, stand at starts[i] or later: gives up what none of them sees.

        Nor what a token at the beginning of their page sees: if the sequence ends in this page, its like will go on from there.
        """
        first = self.first_page[rows]
        count = self._first_visible(starts // self._page_size * self._page_size) - first
        most = int(count.max(initial=0))
        if most <= 0:
            return
        if most == 1:
            moves = count > 0
            self._drop(self._table.entries[rows[moves], first[moves]])
        else:
            parts = zip(rows.tolist(), first.tolist(), count.tolist(), strict=True)
            self._drop(np.concatenate([self._table.entries[row, start : start + max(n, 0)] for row, start, n in parts]))
        self.first_page[rows] = np.maximum(first, first + count)

    def switch(self, row: int, start: int, pages: np.ndarray) -> None:
        """The tree's pages (NO_PAGE: none) take the place of the row's own from page `start` on, where the row holds any."""
        own = self.row_pages(row, start, start + len(pages))
        at = np.flatnonzero((pages != NO_PAGE) & (own != NO_PAGE) & (pages != own))
        if len(at):
            self._hold(pages[at])
            self._drop(own[at])
            self._table.write_one_each(np.full(len(at), row, np.int32), (start + at).astype(np.int32), pages[at])

    def end(self, row: int) -> None:
        """The row gives up all it holds."""
        self._drop(self._table.entries[row, int(self.first_page[row]) : int(self._row_num_pages[row])])
        self.first_page[row] = 0

    def row_pages(self, row: int, start: int, end: int) -> np.ndarray:
        """The pages [start, end) of a row, NO_PAGE where they are given up; a copy."""
        pages = self._table.entries[row, start:end].copy()
        pages[: max(int(self.first_page[row]) - start, 0)] = NO_PAGE
        return pages

    def rebuild(self, tree_pages: np.ndarray) -> None:
        super().rebuild(tree_pages)
        self.first_page[:] = 0

    # --- inside

    def _first_visible(self, positions: np.ndarray) -> np.ndarray:
        """The page of the first token that a token at each position sees."""
        return np.maximum(positions - (self.window - 1), 0) // self._page_size
