"""Residents: the requests that hold a row and pages, from admission to release.

The one place where a lease ends, so the rule that keeps results apart stands here: a row is released only when no launched,
unprocessed step names it. A request that ends while a step is in flight is finished at once for its user and
released when that step's result arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.cache.manager import Lease
from jaxserve.cache.shards import ShardedCache
from jaxserve.scheduler.adapter_slots import AdapterSlots
from jaxserve.scheduler.req import Req, RequestState
from jaxserve.scheduler.rows import RowTable
from jaxserve.types import FinishReason


class Residents:
    def __init__(self, cache: ShardedCache, table: RowTable, slots: AdapterSlots, wall_clock: Callable[[], float]) -> None:
        self._cache = cache
        self._table = table
        self._slots = slots
        self._wall_clock = wall_clock
        self._reqs: dict[int, Req] = {}  # by row, in order of admission
        self.num_changes = 0  # rises whenever pages or rows may have become available

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def live(self) -> list[Req]:
        """Those that were not finished yet, in order of admission."""
        return [req for req in self._reqs.values() if not req.is_finished]

    def attach(self, req: Req, lease: Lease) -> None:
        req.lease = lease
        req.move_to(RequestState.PREFILL)
        if req.adapter is not None:
            self._slots.take(req.adapter)
        if not req.has_begun:
            req.cached_len = lease.prefix_len
        req.has_begun = True
        self._table.put(req)
        self._reqs[lease.row] = req

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Ends a request; its outputs have been read from the row table already."""
        req.finish(reason)
        self._leave_slot(req)
        self._table.alive[req.row] = False
        if not self._table.in_flight[req.row]:
            self._release(req)

    def discard_prefix(self, req: Req) -> None:
        """What this request computed is wrong: nobody may reuse it."""
        assert req.lease is not None, f"request {req.rid} holds nothing"
        self._cache.discard(req.lease)

    def retract(self, req: Req) -> None:
        """Takes row and pages away; the request keeps its outputs and goes back to WAITING."""
        req.times.retracted(self._wall_clock())
        self.send_back(req)

    def send_back(self, req: Req, computed_len: int = 0) -> None:
        """The same where memory is not short: so many tokens, whose KV is valid, stay cached."""
        row = req.row
        assert not self._table.in_flight[row], f"request {req.rid} is retracted while a launched step names row {row}"
        req.output_ids = self._table.output_ids(row).copy()
        if req.logprobs is not None:
            req.output_logprobs = self._table.output_logprobs(row).copy()
        req.sent_len = int(self._table.sent_len[row])
        req.verify_steps, req.accepted_drafts = int(self._table.verify_steps[row]), int(self._table.accepted_drafts[row])
        req.move_to(RequestState.WAITING)
        self._leave_slot(req)
        self._release(req, computed_len)

    def launched(self, rows: np.ndarray) -> None:
        self._table.in_flight[rows] += 1

    def processed(self, rows: np.ndarray) -> None:
        """A step's result is in: rows whose request ended meanwhile are released when this was the last step to name them."""
        in_flight = self._table.in_flight[rows] - 1
        self._table.in_flight[rows] = in_flight
        over = ~self._table.alive[rows] & (in_flight == 0)
        if over.any():
            for row in rows[over].tolist():
                self._release(self._reqs[row])

    def _leave_slot(self, req: Req) -> None:
        """No step to come has it. Launched ones come before whatever goes into the slot next."""
        if req.adapter is not None:
            self._slots.leave(req.adapter)

    def _release(self, req: Req, computed_len: int = 0) -> None:
        assert req.lease is not None, f"request {req.rid} released twice"
        table, row = self._table, req.lease.row
        valid_ids = table.tokens[row, :computed_len] if computed_len else None
        if req.finish_reason is not None and req.finish_reason.type != "abort":
            valid_len = min(int(table.kv_len[row]), int(table.known_len[row]))
            valid_ids = table.tokens[row, :valid_len]
        self._cache.release(req.lease, valid_ids)
        req.lease = None
        table.clear(row)
        del self._reqs[row]
        self.num_changes += 1
