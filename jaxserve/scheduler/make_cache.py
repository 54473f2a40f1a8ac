"""The cache that a server's options and its runner ask for: a CacheManager for each shard."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.cache import CacheManager, ShardedCache
from jaxserve.config import ServerArgs
from jaxserve.runner import RunnerSpec


def make_cache(args: ServerArgs, spec: RunnerSpec, on_eviction: Callable[[list[int], float], None]) -> ShardedCache:
    """`on_eviction` as in CacheManager, of any shard."""

    def shard(rows: range) -> CacheManager:
        return CacheManager(
            groups=spec.kv_groups,
            page_size=spec.page_size,
            max_rows=spec.max_rows,
            max_pages_per_row=spec.max_pages_per_row,
            rows=rows,
            eviction_policy=args.radix_eviction_policy,
            disable_radix=args.disable_radix_cache,
            num_snapshots=spec.num_snapshots,
            snapshot_interval=args.mamba_track_interval,
            record_events=args.kv_events is not None,
            on_eviction=on_eviction,
        )

    size = spec.rows_per_shard
    return ShardedCache([shard(range(first_row, first_row + size)) for first_row in range(0, spec.max_rows, size)])
