"""Snapshots of the states that some layers keep: one behind some of a row's pages, held by rows and by the tree.

A sequence can go on behind a page only if there is a snapshot of its states there, so the tree counts them like the pages of a
window that sees one page. But few pages have one: a snapshot is as large as thousands of tokens. Rows leave one where others
are likely to go on: behind the last whole page of a prompt, or of the part of it that a step computes; where a prompt leaves
what is cached already, for then it is not the last to do so; and every so many tokens of what is generated. If none is free,
none is left, and nothing else happens.
"""

from __future__ import annotations

import numpy as np

from jaxserve.cache.page_allocator import NO_PAGE
from jaxserve.cache.req_to_token import PageTable
from jaxserve.cache.shared_pages import SharedPages


class StateGroup(SharedPages):
    window = 2  # as the tree sees it: who goes on behind a page needs that page's, and no other

    def __init__(self, num_snapshots: int, page_size: int, table: PageTable, interval_tokens: int) -> None:
        """`interval_tokens`: at least so many generated tokens lie between two snapshots of a row."""
        super().__init__(num_snapshots, " of states")
        self.interval = -(-interval_tokens // page_size) * page_size
        self._page_size = page_size
        self._table = table
        self._of_row: dict[int, dict[int, int]] = {}  # row -> number of a page -> the snapshot behind it, the newest last

    # --- rows

    def begin(self, row: int, snapshots: np.ndarray) -> None:
        """A row goes on behind a cached prefix, of whose pages these are the snapshots."""
        self._of_row[row] = {}
        if len(snapshots):
            assert snapshots[-1] != NO_PAGE, f"row {row} goes on behind {len(snapshots)} pages without a state"
            self._hold(snapshots[-1:])
            self._enter(row, len(snapshots) - 1, int(snapshots[-1]))

    def extend(self, rows: np.ndarray, index: np.ndarray) -> None:
        """Rows get new pages, which have no snapshot yet."""
        self._table.write_one_each(rows, index, np.full(len(rows), NO_PAGE, np.int32))

    def let_go(self, row: int, start: int) -> None:
        """The row's next step begins at token `start` or later: of its snapshots up to there it gives up all but the newest."""
        held = self._of_row[row]
        old = sorted(page for page in held if (page + 1) * self._page_size <= start)[:-1]
        self._drop(np.array([held.pop(page) for page in old], np.int32))

    def has(self, row: int, length: int) -> bool:
        """Whether the row holds a snapshot behind its first `length` tokens."""
        return length // self._page_size - 1 in self._of_row[row]

    def leave(self, row: int, length: int) -> None:
        """The row's next step leaves a snapshot behind its first `length` tokens, whole pages. One is free."""
        (snapshot,) = self._pop(1).tolist()
        self.holds[snapshot] = 1
        self._enter(row, length // self._page_size - 1, snapshot)

    def switch(self, row: int, start: int, snapshots: np.ndarray) -> None:
        """The tree's (NO_PAGE: none) take the place of the row's own from page `start` on, where the row holds any."""
        for page, own in list(self._of_row[row].items()):
            if start <= page < start + len(snapshots) and (kept := int(snapshots[page - start])) not in (NO_PAGE, own):
                self._hold(np.array([kept]))
                self._drop(np.array([own]))
                self._enter(row, page, kept)

    def end(self, row: int) -> None:
        """The row gives up all it holds."""
        self._drop(np.array(list(self._of_row.pop(row).values()), np.int32))

    def row_pages(self, row: int, start: int, end: int) -> np.ndarray:
        """The snapshots behind the pages [start, end) of a row, NO_PAGE where it holds none."""
        found = np.full(end - start, NO_PAGE, np.int32)
        for page, snapshot in self._of_row[row].items():
            if start <= page < end:
                found[page - start] = snapshot
        return found

    def rebuild(self, tree_pages: np.ndarray) -> None:
        super().rebuild(tree_pages)
        self._of_row.clear()

    def _enter(self, row: int, page: int, snapshot: int) -> None:
        self._of_row[row][page] = snapshot
        self._table.write(row, page, np.array([snapshot], np.int32))
