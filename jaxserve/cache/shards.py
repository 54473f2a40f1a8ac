"""ShardedCache: the caches of all shards, each a CacheManager with rows, pools and a tree of its own.

With attention by data parallelism a request lives in one shard, from admission to release: its row says in which. Prefixes are
found where they were computed. Who decides looks at `shards` one by one; what follows from a row, and what is told about the
server as a whole, stands here. Without it there is one shard, to which everything is handed on as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxserve.cache.audit import LeakReport
from jaxserve.cache.events import KVCacheEvent
from jaxserve.cache.manager import CacheManager, Lease, PoolUsage
from jaxserve.cache.merged_events import MergedEvents
from jaxserve.cache.radix_cache import PrefixMatch
from jaxserve.cache.req_to_token import joined
from jaxserve.runner import PageUpdates


@dataclasses.dataclass(frozen=True)
class LeakReports:
    """Of each shard."""

    shards: tuple[LeakReport, ...]

    @property
    def is_clean(self) -> bool:
        return all(report.is_clean for report in self.shards)

    def describe(self) -> str:
        """One line for the log."""
        if len(self.shards) == 1:
            return self.shards[0].describe()
        return "; ".join(f"shard {shard}: {report.describe()}" for shard, report in enumerate(self.shards))


class ShardedCache:
    def __init__(self, shards: Sequence[CacheManager]) -> None:
        """They divide the request rows among them in order, equally many each."""
        self.shards = tuple(shards)
        self._rows_per_shard = len(shards[0].rows)
        for index, shard in enumerate(shards):
            first = index * self._rows_per_shard
            assert shard.rows == range(first, first + self._rows_per_shard), f"shard {index} has {shard.rows}"
        self._events = MergedEvents()

    @property
    def page_size(self) -> int:
        return self.shards[0].page_size

    @property
    def disable_radix(self) -> bool:
        return self.shards[0].disable_radix

    def of(self, row: int) -> CacheManager:
        """The shard of a row."""
        return self.shards[row // self._rows_per_shard]

    def by_shard(self, rows: np.ndarray) -> list[tuple[CacheManager, np.ndarray]]:
        """Every shard and those of the rows that are its own, in their order."""
        return [(shard, rows[at]) for shard, at in self._parts(rows)]

    # --- how full it is, in tokens: of all shards together

    def pool_usage(self) -> tuple[PoolUsage, ...]:
        """Of each KV group."""
        return tuple(map(_sum_of_pools, zip(*(shard.pool_usage() for shard in self.shards), strict=True)))

    def snapshot_usage(self) -> dict[str, int]:
        """As CacheManager says it."""
        usages = [shard.snapshot_usage() for shard in self.shards]
        return {name: sum(usage[name] for usage in usages) for name in usages[0]}

    @property
    def num_cached_tokens(self) -> int:
        """Prefixes that the trees know, in use or not."""
        return sum(shard.num_cached_tokens for shard in self.shards)

    def counts(self) -> dict[str, Any]:
        """For /server_info."""
        of_shards = {"attn_dp": self._shard_states()} if len(self.shards) > 1 else {}
        return {"num_cached_tokens": self.num_cached_tokens, "snapshots": self.snapshot_usage(), **of_shards}

    def _shard_states(self) -> list[dict[str, float]]:
        return [
            {
                "num_running_reqs": shard.num_leases,
                "num_used_tokens": max(pool.used_tokens for pool in pools),
                "token_usage": max(pool.token_usage for pool in pools),
            }
            for shard, pools in ((shard, shard.pool_usage()) for shard in self.shards)
        ]

    # --- for all shards at once

    def drain_page_updates(self) -> PageUpdates:
        """The page-table entries written since the last call. An entry may occur twice, then with the same page."""
        return joined([shard.drain_page_updates() for shard in self.shards])

    def take_events(self) -> list[KVCacheEvent]:
        """Which whole-page prefixes can be found somewhere, and which no longer, since the last call."""
        events = [shard.take_events() for shard in self.shards]
        return events[0] if len(events) == 1 else self._events.merge(events)

    def match(self, token_ids: np.ndarray, extra_key: str | None = None) -> PrefixMatch:
        """How much of a prompt is cached where most of it is, for ordering the queue."""
        return max((shard.match(token_ids, extra_key) for shard in self.shards), key=lambda match: match.length_tokens)

    def grow_rows(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, held: np.ndarray | None = None) -> bool:
        """As CacheManager's, all or none whichever shards they are in. Rows give back what is behind their windows in any
        case."""
        if len(self.shards) == 1:
            return self.shards[0].grow_rows(rows, starts, ends, held)
        parts = list(self._parts(rows))
        for shard, at in parts:
            shard.slide_windows(rows[at], starts[at])
        if not all(shard.has_room(rows[at], ends[at]) for shard, at in parts):
            return False
        held = starts if held is None else held
        for shard, at in parts:
            has_grown = shard.grow_rows(rows[at], starts[at], ends[at], held[at])
            assert has_grown, f"rows {rows[at].tolist()} have no room although they had it"
        return True

    # --- what follows from a row

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:
        self.of(lease.row).commit(lease, token_ids)

    def discard(self, lease: Lease) -> None:
        self.of(lease.row).discard(lease)

    def release(self, lease: Lease, token_ids: np.ndarray | None = None) -> None:
        self.of(lease.row).release(lease, token_ids)

    # --- when idle

    def flush(self) -> bool:
        """Drops all cached prefixes. False, and nothing changed, while a lease is out."""
        if any(shard.num_leases for shard in self.shards):
            return False
        for shard in self.shards:
            shard.flush()
        return True

    def check(self) -> LeakReports:
        """Compares the books; only meaningful when no lease should be out."""
        return LeakReports(tuple(shard.check() for shard in self.shards))

    def repair(self, reports: LeakReports) -> None:
        """Of the shards whose books are wrong."""
        for shard, report in zip(self.shards, reports.shards, strict=True):
            if not report.is_clean:
                shard.repair(report)

    def _parts(self, rows: np.ndarray) -> Iterator[tuple[CacheManager, np.ndarray | slice]]:
        """Every shard, and where among the rows its own stand."""
        if len(self.shards) == 1:
            yield self.shards[0], slice(None)
            return
        shard_of = rows // self._rows_per_shard
        for index, shard in enumerate(self.shards):
            yield shard, np.flatnonzero(shard_of == index)


def _sum_of_pools(pools: tuple[PoolUsage, ...]) -> PoolUsage:
    return PoolUsage(
        window=pools[0].window,
        used_tokens=sum(pool.used_tokens for pool in pools),
        evictable_tokens=sum(pool.evictable_tokens for pool in pools),
        total_tokens=sum(pool.total_tokens for pool in pools),
    )
