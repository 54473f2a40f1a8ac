"""MicroBatches: which of the running rows decode in the next step of a pipeline. P steps are under way, one in each stage.

A row's next token needs the one before, so a row that is in one of the last P - 1 steps would wait on the device, and stages
with it. Rows that are in none of them are due. Of these go those that have waited longest, as many as is their share: P steps
divide all rows among them, so micro-batches stay disjoint, and even out when requests come and end. Steps that only prefill
have a place in this ring, too; then fewer steps divide the rows.

If no row is due, there are too few for a ring without gaps. Prefill steps may fill these. Without any, the rows that have
waited longest go on all the same, so that a step stands ready where the one before it ends; but never two steps ahead of what
the host knows, for all that is launched later has to wait behind them.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from jaxserve.config import ServerArgs
from jaxserve.runner import RunnerSpec
from jaxserve.scheduler.batch import NO_ROWS, ScheduleBatch
from jaxserve.scheduler.rows import RowTable

# A row that decodes is in no more launched, unprocessed steps: the one that is under way, and one that waits for it.
_MOST_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    rows: np.ndarray  # int32, in the order of the step
    is_due: bool  # they wait for no step that is under way


_NOBODY = MicroBatch(NO_ROWS, False)


class MicroBatches:
    def __init__(self, table: RowTable, *, num_stages: int, num_shards: int = 1, most_rows: int | None = None) -> None:
        """`most_rows`: in one step. Each shard's rows are divided by themselves, as devices wait for those of other shards."""
        self._table = table
        self._num_stages = num_stages
        self._num_shards = num_shards
        self._rows_per_shard = len(table.alive) // num_shards
        self._most_of_shard = len(table.alive) if most_rows is None else max(most_rows // num_shards, 1)
        self._launched_in = np.zeros(len(table.alive), np.int64)  # the newest step that names the row, counted
        self._num_launched = self._num_decoding = 0  # steps; and those with rows that decode
        self._newest_decode: collections.deque[bool] = collections.deque(maxlen=num_stages - 1)  # of the last P - 1

    def launched(self, batch: ScheduleBatch) -> None:
        decodes = len(batch.decode_rows) > 0
        self._launched_in[batch.rows] = self._num_launched
        self._num_launched += 1
        self._num_decoding += decodes
        self._newest_decode.append(decodes)

    def pick(self, rows: np.ndarray) -> MicroBatch:
        """Of all `rows` that can decode, in the order they joined."""
        in_flight, launched_in = self._table.in_flight[rows], self._launched_in[rows]
        is_picked = (in_flight == 0) | (launched_in <= self._num_launched - self._num_stages)
        is_due = bool(is_picked.any())
        if not is_due:
            may_wait = in_flight < _MOST_IN_FLIGHT
            if not may_wait.any():
                return _NOBODY
            is_picked = may_wait & (launched_in == launched_in[may_wait].min())
        picked = np.flatnonzero(is_picked)
        picked = rows[picked[np.argsort(launched_in[picked], kind="stable")]]
        return MicroBatch(self._shares(picked, rows), is_due)

    def _shares(self, picked: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if self._num_shards == 1:
            return picked[: self._share(len(rows))]
        counts = np.bincount(rows // self._rows_per_shard, minlength=self._num_shards).tolist()
        shard_of = picked // self._rows_per_shard
        return np.concatenate([picked[shard_of == shard][: self._share(count)] for shard, count in enumerate(counts)])

    def _share(self, num_rows: int) -> int:
        """Of one shard's rows. Of D steps in a row each takes floor((n + j) / D) with another j, which makes n together."""
        num_steps = self._num_stages - self._newest_decode.count(False)
        share = (num_rows + self._num_decoding % num_steps) // num_steps
        return min(max(share, 1), self._most_of_shard)


def micro_batches_for(args: ServerArgs, spec: RunnerSpec, table: RowTable) -> MicroBatches | None:
    """None: all rows decode in the same step."""
    if spec.num_stages == 1:
        return None
    return MicroBatches(table, num_stages=spec.num_stages, num_shards=spec.num_shards, most_rows=args.pp_max_micro_batch_size)
