"""Request rows and their page tables: which page holds the i-th page of tokens of a row.

The host's mirror of the table on the device. Every write here is noted, and `drain_updates` hands the notes to the next step.
Knows nothing of the radix tree, of tokens, or of who owns a page.
"""

from __future__ import annotations

import numpy as np

from jaxserve.runner import PageUpdates


class ReqToTokenPool:
    def __init__(self, max_rows: int, max_pages_per_row: int) -> None:
        assert max_rows >= 1, f"at least one request row is needed, got {max_rows}"
        assert max_pages_per_row >= 1, f"a row needs at least one page, got {max_pages_per_row}"
        self.max_rows = max_rows
        self.max_pages_per_row = max_pages_per_row
        # Zeroed memory is only committed where it is written, so a long context costs nothing until it is used.
        self.page_table = np.zeros((max_rows, max_pages_per_row), np.int32)
        self.num_pages = np.zeros(max_rows, np.int32)  # filled entries of each row
        self._free_rows = list(range(max_rows - 1, -1, -1))
        # Written entries by (rows, index). Their pages are read from the table when drained: an entry written twice is
        # reported twice with one value, so a device scatter may apply the updates in any order.
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        empty = np.zeros(0, np.int32)
        self._no_updates = PageUpdates.of(empty, empty, empty)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self) -> int:
        return self._free_rows.pop()

    def return_row(self, row: int) -> None:
        self.num_pages[row] = 0
        self._free_rows.append(row)

    def busy_rows(self) -> list[int]:
        return sorted(set(range(self.max_rows)) - set(self._free_rows))

    def reset_rows(self) -> None:
        self.num_pages[:] = 0
        self._free_rows = list(range(self.max_rows - 1, -1, -1))

    def append(self, row: int, pages: np.ndarray) -> None:
        """Adds pages at the end of one row."""
        start = int(self.num_pages[row])
        self._check_width(row, start + len(pages))
        self.num_pages[row] = start + len(pages)
        self.replace(row, start, pages)

    def replace(self, row: int, start: int, pages: np.ndarray) -> None:
        """Overwrites entries [start, start + len(pages)) of one row."""
        if len(pages) == 0:
            return
        end = start + len(pages)
        self.page_table[row, start:end] = pages
        self._pending.append((np.full(len(pages), row, np.int32), np.arange(start, end, dtype=np.int32)))

    def append_one_each(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Adds pages[i] at the end of row rows[i]; the rows are distinct."""
        index = self.num_pages[rows]
        if int(index.max()) >= self.max_pages_per_row:
            self._check_width(int(rows[index.argmax()]), int(index.max()) + 1)
        self.page_table[rows, index] = pages
        self.num_pages[rows] = index + 1
        self._pending.append((rows.astype(np.int32), index))

    def row_pages(self, row: int, start: int) -> np.ndarray:
        """A copy of a row's filled entries from `start` on."""
        return self.page_table[row, start : int(self.num_pages[row])].copy()

    def drain_updates(self) -> PageUpdates:
        """All entries written since the last call, as new arrays."""
        if not self._pending:
            return self._no_updates
        if len(self._pending) == 1:
            rows, index = self._pending[0]
        else:
            rows = np.concatenate([chunk[0] for chunk in self._pending])
            index = np.concatenate([chunk[1] for chunk in self._pending])
        self._pending = []
        return PageUpdates.of(rows, index, self.page_table[rows, index])

    def _check_width(self, row: int, num_pages: int) -> None:
        assert num_pages <= self.max_pages_per_row, (
            f"row {row} would hold {num_pages} pages, more than {self.max_pages_per_row}"
        )
