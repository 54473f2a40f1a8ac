"""Preemption: which running requests give way for a more urgent one that finds no room.

Requests only make room in their own shard: so they give way where all less urgent ones together hold what is needed, or not at
all.
"""

from __future__ import annotations

from jaxserve.cache.manager import CacheManager
from jaxserve.cache.shards import ShardedCache
from jaxserve.scheduler.decode import RunningBatch
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowTable


class Preemption:
    def __init__(
        self,
        cache: ShardedCache,
        table: RowTable,
        running: RunningBatch,
        residents: Residents,
        *,
        max_running: int,
        threshold: int | None,
    ) -> None:
        """`threshold`: by how much more urgent a request must be; None: nobody gives way."""
        self._cache = cache
        self._table = table
        self._running = running
        self._residents = residents
        self._max_running = max_running
        self._threshold = threshold

    def victims(self, req: Req) -> list[Req]:
        """Who may give way for a waiting request, the least urgent and latest first, if that can be enough."""
        less_urgent = self._less_urgent(req)
        by_shard: dict[CacheManager, list[Req]] = {}
        for other in less_urgent:
            by_shard.setdefault(self._cache.of(other.row), []).append(other)
        needed = req.fill_len + self._cache.page_size
        for shard, some in by_shard.items():
            # Each holds this much at most; shared prefixes stay.
            held = sum(int(self._table.max_len[other.row]) for other in some)
            if needed < held + shard.available_tokens:
                return some
        if len(self._residents) < self._max_running:
            return []
        has_room = any(shard.free_rows and needed < shard.available_tokens for shard in self._cache.shards)
        return less_urgent if has_room else []

    def _less_urgent(self, req: Req) -> list[Req]:
        if self._threshold is None:
            return []
        running = [self._table.req(row) for row in self._running.rows.tolist() if self._table.alive[row]]
        less_urgent = [other for other in running if req.urgency - other.urgency > self._threshold]
        return sorted(less_urgent, key=lambda other: (other.urgency, -other.arrival))
