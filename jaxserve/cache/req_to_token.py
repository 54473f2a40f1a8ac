"""Request rows and their page tables: which page holds the i-th page of tokens of a row.

The host's mirror of the tables on the device, one for each KV group. Every write here is noted, and `drain_updates` hands the
notes to the next step. Knows nothing of the radix tree, of tokens, or of who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.runner import PageUpdates


class PageTable:
    """Of one KV group: int32 [max_rows, max_pages_per_row]."""

    def __init__(self, group: int, max_rows: int, max_pages_per_row: int) -> None:
        self._group = group
        # Zeroed memory is only committed where it is written, so a long context costs nothing until it is used.
        self.entries = np.zeros((max_rows, max_pages_per_row), np.int32)
        # Written entries by (rows, index). Their pages are read from the table when drained: an entry written twice is
        # reported twice with one value, so a device scatter may apply the updates in any order.
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []

    def write(self, row: int, start: int, pages: np.ndarray) -> None:
        """Entries [start, start + len(pages)) of one row."""
        if len(pages) == 0:
            return
        end = start + len(pages)
        self.entries[row, start:end] = pages
        self._pending.append((np.full(len(pages), row, np.int32), np.arange(start, end, dtype=np.int32)))

    def write_one_each(self, rows: np.ndarray, index: np.ndarray, pages: np.ndarray) -> None:
        """Entry index[i] of row rows[i], for distinct ones."""
        self.entries[rows, index] = pages
        self._pending.append((rows.astype(np.int32), index))

    def drain_updates(self) -> PageUpdates | None:
        """All entries written since the last call, as new arrays; None if there are none."""
        if not self._pending:
            return None
        if len(self._pending) == 1:
            rows, index = self._pending[0]
        else:
            rows = np.concatenate([chunk[0] for chunk in self._pending])
            index = np.concatenate([chunk[1] for chunk in self._pending])
        self._pending = []
        return PageUpdates.of(rows, index, self.entries[rows, index], self._group)


class ReqToTokenPool:
    def __init__(self, max_rows: int, max_pages_per_row: int, num_groups: int = 1, rows: range | None = None) -> None:
        """`rows`: those it may give out, of all there are; None: all."""
        assert max_rows >= 1, f"at least one request row is needed, got {max_rows}"
        assert max_pages_per_row >= 1, f"a row needs at least one page, got {max_pages_per_row}"
        self.rows = range(max_rows) if rows is None else rows
        assert 0 <= self.rows.start < self.rows.stop <= max_rows, f"{self.rows} of {max_rows} request rows"
        self.max_pages_per_row = max_pages_per_row
        self.tables = [PageTable(group, max_rows, max_pages_per_row) for group in range(num_groups)]
        self.num_pages = np.zeros(max_rows, np.int32)  # filled entries of each row, in every table
        self._free_rows = list(reversed(self.rows))
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
        return sorted(set(self.rows) - set(self._free_rows))

    def reset_rows(self) -> None:
        self.num_pages[:] = 0
        self._free_rows = list(reversed(self.rows))

    def extend(self, row: int, count: int) -> int:
        """Room for `count` more pages at the end of a row; returns the first one's index. The caller writes them."""
        start = int(self.num_pages[row])
        self._check_width(row, start + count)
        self.num_pages[row] = start + count
        return start

    def extend_by_one(self, rows: np.ndarray) -> np.ndarray:
        """The same for one page of each of some distinct rows: their indices."""
        index = self.num_pages[rows]
        if int(index.max()) >= self.max_pages_per_row:
            self._check_width(int(rows[index.argmax()]), int(index.max()) + 1)
        self.num_pages[rows] = index + 1
        return index

    def drain_updates(self) -> PageUpdates:
        """The entries of all tables written since the last call."""
        updates = [update for table in self.tables if (update := table.drain_updates()) is not None]
        return joined(updates) if updates else self._no_updates

    def _check_width(self, row: int, num_pages: int) -> None:
        assert num_pages <= self.max_pages_per_row, (
            f"row {row} would hold {num_pages} pages, more than {self.max_pages_per_row}"
        )


def joined(updates: Sequence[PageUpdates]) -> PageUpdates:
    """One after the other; at least one."""
    if len(updates) == 1:
        return updates[0]
    return PageUpdates(*(np.concatenate(column) for column in zip(*map(_columns, updates), strict=True)))


def _columns(updates: PageUpdates) -> tuple[np.ndarray, ...]:
    return updates.rows, updates.index, updates.pages, updates.groups
