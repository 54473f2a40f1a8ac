"""FakeStates: the device's states of layers that keep some, where a state is the tokens that it has seen.

It reads the snapshots' table as `executor.state_rows` does, and checks that every row goes on from its own state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.runner import PageUpdates


class FakeRow(NamedTuple):
    """What a step does to a row: it computes the tokens from `start` on."""

    row: int
    start: int
    tokens: Sequence[int]  # all of the sequence, with the step's, be they drafts


class FakeStates:
    def __init__(self, max_rows: int, max_pages: int, page_size: int, group: int, per_row: int = 1) -> None:
        """`group`: the table's number. `per_row`: most tokens that a decode step adds to a row."""
        self.table = np.full((max_rows, max_pages), -1, np.int32)
        self._page_size = page_size
        self._group = group
        self._per_row = per_row
        self._own: dict[tuple[int, int], Hashable] = {}  # by row, and length modulo `per_row`
        self._snapshots: dict[int, Hashable] = {}

    def enter(self, updates: PageUpdates) -> None:
        of_states = updates.groups == self._group
        self.table[updates.rows[of_states], updates.index[of_states]] = updates.pages[of_states]

    def run(self, rows: Sequence[FakeRow], weights: int = 0, *, in_turn: bool = False) -> None:
        """`in_turn`: a step that only decodes, which leaves the state behind each token."""
        read: set[int] = set()
        left: dict[int, Hashable] = {}
        for row, start, tokens in rows:
            entries, end = self.table[row].tolist(), len(tokens)
            source = entries[start // self._page_size - 1] if start and start % self._page_size == 0 else -1
            if start:
                state = self._snapshots[source] if source >= 0 else self._own[row, start % self._per_row]
                assert state == (weights, *tokens[:start]), f"row {row} goes on at {start} from another state"
                read |= {source} - {-1}
            behind = {(page + 1) * self._page_size: snapshot for page, snapshot in enumerate(entries) if snapshot >= 0}
            passed = {length: snapshot for length, snapshot in behind.items() if start < length <= end}
            assert in_turn or len(passed) <= 2, f"row {row} leaves {len(passed)} states in a step"
            for length, snapshot in passed.items():
                assert snapshot not in left, "two states go to one place"
                left[snapshot] = (weights, *tokens[:length])
            for length in range(start + 1 if in_turn else end, end + 1):
                own = "elsewhere" if length in passed else (weights, *tokens[:length])
                self._own[row, length % self._per_row] = own
        assert not read & left.keys(), "a state is overwritten in the step that reads it"
        self._snapshots |= left
