"""Where a step's rows, tokens and page-table entries go when they are dealt out to shards (attention by data parallelism).

The scheduler numbers request rows 0 .. max_rows - 1, those of a shard in a row, and gives a step's rows in any order. On the
device each shard has its own lines: of tables one per request row and one for padding, of a step those of its bucket. With one
shard that is the order they come in, and costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxserve.executor.forward_batch import NO_ROW, Bucket, Places, packed_len, split_packed
from jaxserve.runner import NO_SLOT, PageUpdates, RunnerSpec, StepInput


@dataclasses.dataclass(frozen=True)
class Shards:
    """How the device's arrays are divided."""

    count: int
    rows_each: int  # request rows
    tables_each: int  # page tables: one per KV group, and that of snapshots
    slots_each: int  # of hidden states

    @staticmethod
    def of(spec: RunnerSpec) -> Shards:
        return Shards(spec.num_shards, spec.rows_per_shard, spec.num_tables, spec.max_slots)

    @property
    def padding_row(self) -> int:
        """Of each shard's lines of a table, the one behind those of its request rows."""
        return self.rows_each

    def line(self, row: int) -> int:
        """Of a request row, in what has a line for each row of all shards."""
        shard, own = divmod(row, self.rows_each)
        return shard * (self.rows_each + 1) + own

    def fullest(self, step: StepInput) -> Places:
        """How many rows the shard with most of them has, and how many tokens the one with most (not of a step that decodes)."""
        if self.count == 1:
            return Places(step.num_rows, step.num_tokens)
        shard = step.rows // self.rows_each
        rows, tokens = np.bincount(shard).max(initial=0), np.bincount(shard, step.extend_lens).max(initial=0)
        return Places(int(rows), int(tokens))

    def deal(self, step: StepInput, bucket: Bucket) -> Deal:
        live = step.num_rows
        if self.count == 1:
            return Deal(self, bucket, step, slice(live), (0, slice(live)))
        shard, own = np.divmod(step.rows, self.rows_each)
        place = _rank_within(shard, self.count)
        return Deal(self, bucket, step, shard * bucket.num_rows + place, (shard, place), own)

    def beyond(self, updates: PageUpdates, room: int) -> np.ndarray | None:
        """bool per entry: those for which a step with room for so many of each shard has none; None if there are none."""
        if len(updates) <= room:
            return None
        rank = np.arange(len(updates)) if self.count == 1 else _rank_within(updates.rows // self.rows_each, self.count)
        is_beyond = rank >= room
        return is_beyond if is_beyond.any() else None

    def pack_page_updates(self, updates: PageUpdates, count: int) -> np.ndarray:
        """int32 [3, count]: row of the page tables of all shards, index, page."""
        shard, rows = np.divmod(updates.rows, self.rows_each)
        table = shard * self.tables_each + updates.groups
        packed = _no_updates((3, count))
        packed[:, : len(updates)] = table * (self.rows_each + 1) + rows, updates.index, updates.pages
        return packed


@dataclasses.dataclass(frozen=True)
class Deal:
    """Of one step in its bucket of R rows and T tokens for each of D shards."""

    shards: Shards
    bucket: Bucket
    step: StepInput
    lines: Any  # an index into arrays [D * R, ...]: where the step's rows are
    rows_at: tuple[Any, ...]  # the same for [D, R, ...]
    own_rows: np.ndarray | None = None  # int32 [rows]: by the shard's own numbers; None where they are the scheduler's

    def hidden_slots(self, slots: np.ndarray) -> np.ndarray:
        """Slots of the step, as in a ScoreQuery, as lines of the hidden states of all shards."""
        if self.own_rows is None:
            return slots
        shard, slot = np.divmod(self._slots[slots], self.bucket.num_tokens)
        return (shard * self.shards.slots_each + slot).astype(np.int32)

    def logit_lines(self, lines: np.ndarray) -> np.ndarray:
        """Lines of the step's logits, as in LogitLines, among those of all shards."""
        if self.own_rows is None:
            return lines
        row, place = np.divmod(lines, self.bucket.tokens_per_row)
        return (self.lines[row] * self.bucket.tokens_per_row + place).astype(np.int32)

    def pack(self, row_params: np.ndarray, adapter_slots: np.ndarray | None = None) -> np.ndarray:
        """The step in a new int32 buffer. `row_params` int32 [rows, NUM_ROW_PARAMS]: of the step's rows, as `adapter_slots`
        int32 [rows], which a bucket with adapters needs.

        The buffer is fresh each time: JAX on CPU may alias it instead of copying, so nobody may write to it afterwards.
        """
        step, bucket = self.step, self.bucket
        assert step.num_tokens <= bucket.total_tokens, f"{step.num_tokens} tokens exceed {bucket}"
        buffer = np.zeros(packed_len(bucket), np.int32)
        views = split_packed(buffer, bucket)
        self._write_counts(views["header"])
        self._write_rows(views["rows"])
        for name in ("seq_lens", "extend_lens", "sample"):
            views[name][self.rows_at] = getattr(step, name)
        views["row_params"][self.rows_at] = row_params
        self._write_page_updates(views["page_updates"])
        if not bucket.decode_only:
            views["input_ids"][self._tokens_at] = step.input_ids
        if bucket.adapts:
            views["adapter_slots"][:] = NO_SLOT
            views["adapter_slots"][self.rows_at] = adapter_slots
        return buffer

    def _write_rows(self, target: np.ndarray) -> None:
        """The request rows, by each shard's own numbers, into [D, R]; padding elsewhere."""
        target[:] = self.shards.padding_row
        target[self.rows_at] = self.step.rows if self.own_rows is None else self.own_rows

    def _write_counts(self, target: np.ndarray) -> None:
        """[D, 2]: each shard's rows, and how many of them decode."""
        step = self.step
        if self.own_rows is None:
            target[0] = step.num_rows, step.num_decode_rows
            return
        shard, count = self.rows_at[0], self.shards.count
        target[:, 0] = np.bincount(shard, minlength=count)
        target[:, 1] = np.bincount(shard[: step.num_decode_rows], minlength=count)

    def _write_page_updates(self, target: np.ndarray) -> None:
        """[D, 3, U]: row of the shard's page tables, index, page. There is room."""
        updates, rows_each = self.step.page_updates, self.shards.rows_each
        target[:] = _no_updates(target.shape[1:])
        if self.own_rows is None:
            at: tuple[Any, Any] = 0, slice(len(updates))
            rows = updates.rows
        else:
            shard, rows = np.divmod(updates.rows, rows_each)
            at = shard, _rank_within(shard, self.shards.count)
        shard, place = at
        target[shard, 0, place] = updates.groups * (rows_each + 1) + rows
        target[shard, 1, place], target[shard, 2, place] = updates.index, updates.pages

    @property
    def _tokens_at(self) -> tuple[Any, ...]:
        """An index into [D, T], for the tokens of extend rows."""
        if self.own_rows is None:
            return 0, slice(self.step.num_decode_rows, self.step.num_tokens)
        return tuple(np.divmod(self._slots[self.step.num_decode_rows :], self.bucket.num_tokens))

    @functools.cached_property
    def _slots(self) -> np.ndarray:
        """int [the step's tokens]: where they are in [D * T]."""
        step, (shard, place) = self.step, self.rows_at
        if self.bucket.decode_only:
            K = self.bucket.tokens_per_row
            first = shard * self.bucket.num_tokens + place * K
            return np.asarray((first[:, None] + np.arange(K)).reshape(-1))
        order = np.argsort(shard, kind="stable")
        lens = step.extend_lens[order].astype(np.int64)
        before = np.cumsum(lens) - lens  # tokens of all shards, shard by shard
        of_shard = np.bincount(shard, step.extend_lens, self.shards.count).astype(np.int64)
        first = np.empty(step.num_rows, np.int64)
        begins = np.cumsum(of_shard) - of_shard
        first[order] = before - begins[shard[order]] + shard[order] * self.bucket.num_tokens
        ends = np.cumsum(step.extend_lens, dtype=np.int64)
        return np.asarray(np.repeat(first - (ends - step.extend_lens), step.extend_lens) + np.arange(step.num_tokens))


def _no_updates(shape: tuple[int, ...]) -> np.ndarray:
    nothing = np.zeros(shape, np.int32)
    nothing[0] = NO_ROW
    return nothing


def _rank_within(shard: np.ndarray, count: int) -> np.ndarray:
    """int [n]: how many before it are of the same shard."""
    order = np.argsort(shard, kind="stable")
    sizes = np.bincount(shard, minlength=count)
    rank = np.empty(len(shard), np.int64)
    rank[order] = np.arange(len(shard)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank
