"""FakeVectors: the vectors that a fake device makes of texts, known from their tokens alone.

A vector says its tokens, weighted by their positions and counted, the first and the last of them, and what the model expects
behind the last: a number that depends on all tokens before it, read through the row's pages. A row keeps what its parts have
said so far, as a device would. Each PoolQuery is checked against the contract in `runner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.runner import PoolQuery, RowState, RunnerSpec, StepInput, Vectors

VECTOR_SIZE = 5
_MOD = 1 << 20  # sums stay exact in float32


def fake_vectors(**changes: Any) -> Vectors:
    return Vectors(**({"size": VECTOR_SIZE, "gives": "embedding"} | changes))


def expected_vectors(token_ids: Sequence[int], vectors: Vectors, expects: Callable[[Sequence[int]], int]) -> list[list[float]]:
    """What a text must be answered with; `expects`: the token behind a beginning of it."""
    ids = list(token_ids)
    if vectors.of_tokens:
        return [_Sum().add(at, [token]).vector(expects(ids[: at + 1])) for at, token in enumerate(ids)]
    first = 0 if vectors.needs_whole else len(ids) - 1
    return [_Sum().add(first, ids[first:]).vector(expects(ids))]


@dataclasses.dataclass
class _Sum:
    """Of a text's parts so far."""

    weighted: int = 0
    count: int = 0
    first: int = -1
    last: int = -1
    end: int = 0  # the position behind them

    def add(self, start: int, ids: Sequence[int]) -> _Sum:
        self.weighted += sum((token + 1) * (position + 1) for position, token in enumerate(ids, start))
        self.count += len(ids)
        self.first = ids[0] if self.first < 0 else self.first
        self.last = ids[-1]
        self.end = start + len(ids)
        return self

    def vector(self, expected: int) -> list[float]:
        return [float(x) for x in (self.weighted % _MOD, self.count, self.first, self.last, expected)]


class FakeVectors:
    def __init__(self, spec: RunnerSpec, expects: Callable[[int, int], int | None]) -> None:
        """`expects`: the token that a row's first so many tokens make the model expect; None: not a number."""
        self._spec = spec
        self._expects = expects
        self._sums: dict[int, _Sum] = {}  # by row
        self.num_resumed = 0  # parts that went on from others

    def run(self, step: StepInput, slots: Sequence[tuple[int, int]], rows: dict[int, RowState]) -> np.ndarray | None:
        """`slots`: the position and the token of each. `rows`: their states."""
        query, vectors = step.pool_query, self._spec.vectors
        if query is None:
            return None
        assert vectors is not None, "vectors are asked for that the model does not make"
        check_query(query, step, slots, rows, needs_whole=vectors.needs_whole)
        lines: list[list[float]] = []
        parts = zip(query.rows.tolist(), query.first_slots.tolist(), query.counts.tolist(), query.ends.tolist(), strict=True)
        for row, slot, count, ends in parts:
            start, ids = slots[slot][0], [token for _, token in slots[slot : slot + count]]
            if vectors.of_tokens:
                lines += [self._vector(row, _Sum().add(start + at, [token])) for at, token in enumerate(ids)]
            begins = start == 0 or not vectors.needs_whole
            assert begins or row in self._sums, f"row {row} goes on at {start}, and nothing of its text has come"
            text = _Sum() if begins else self._sums.pop(row)
            assert begins or text.end == start, f"row {row} goes on at {start}, its text at {text.end}"
            self.num_resumed += not begins
            text.add(start, ids)
            if not ends:
                self._sums[row] = text
            elif not vectors.of_tokens:
                lines.append(self._vector(row, text))
        return np.array(lines, np.float32).reshape(-1, vectors.size)

    def _vector(self, row: int, text: _Sum) -> list[float]:
        expected = self._expects(row, text.end)
        return [np.nan] * VECTOR_SIZE if expected is None else text.vector(expected)


def check_query(
    query: PoolQuery, step: StepInput, slots: Sequence[tuple[int, int]], rows: dict[int, RowState], *, needs_whole: bool
) -> None:
    """The rules that need no memory of earlier steps."""
    for name in ("rows", "first_slots", "counts", "starts"):
        assert getattr(query, name).dtype == np.int32, f"{name} is {getattr(query, name).dtype}"
    assert query.ends.dtype == bool
    lengths = {len(part) for part in (query.rows, query.first_slots, query.counts, query.starts, query.ends)}
    assert len(lengths) == 1 and 0 not in lengths, f"parts of {lengths}"
    assert len(np.unique(query.rows)) == len(query.rows), f"rows are not distinct: {query.rows.tolist()}"
    assert (np.diff(query.first_slots) > 0).all(), f"parts are not in the order of slots: {query.first_slots.tolist()}"
    extended = step.rows[step.num_decode_rows :].tolist()
    ends = (step.num_decode_rows + np.cumsum(step.extend_lens[step.num_decode_rows :])).tolist()
    slots_of = {
        row: (end - int(step.extend_lens[at]), end)
        for at, (row, end) in enumerate(zip(extended, ends, strict=True), step.num_decode_rows)
    }
    for row, slot, count, start, is_end in zip(
        query.rows.tolist(),
        query.first_slots.tolist(),
        query.counts.tolist(),
        query.starts.tolist(),
        query.ends.tolist(),
        strict=True,
    ):
        assert row in slots_of, f"row {row} extends nothing in this step"
        first, end = slots_of[row]
        assert first <= slot and slot + count == end and count >= 1, f"slots {slot} + {count} of row {row}, not {first}..{end}"
        assert slots[slot][0] == start, f"row {row} begins at {slots[slot][0]}, not at {start}"
        assert is_end == (start + count == rows[row].prompt_len), f"row {row} ends={is_end} at {start + count}"
        if needs_whole:
            assert slot == first, f"row {row} leaves out {slot - first} tokens"
        else:
            assert count == 1 and is_end, f"row {row} gives {count} tokens of which one matters"
