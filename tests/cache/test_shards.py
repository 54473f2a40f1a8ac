"""ShardedCache: rows and pages of each shard, what is told of all of them, and one stream of events for several trees."""

from __future__ import annotations

import numpy as np
import pytest
from cache_machine import array
from cached_prefixes import cached_prefixes
from event_index import EventIndex

from jaxserve.cache import CacheManager, Lease, ShardedCache
from jaxserve.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from jaxserve.cache.merged_events import MergedEvents
from jaxserve.runner import KVGroup

ROWS_PER_SHARD = 2


def make_cache(
    num_shards: int, num_pages: int = 8, page_size: int = 1, windows: tuple[KVGroup, ...] = (), **options: int
) -> ShardedCache:
    return ShardedCache(
        [
            CacheManager(
                groups=(KVGroup(num_pages), *windows),
                page_size=page_size,
                max_rows=num_shards * ROWS_PER_SHARD,
                rows=range(shard * ROWS_PER_SHARD, (shard + 1) * ROWS_PER_SHARD),
                max_pages_per_row=32,
                record_events=True,
                **options,
            )
            for shard in range(num_shards)
        ]
    )


def lease(cache: ShardedCache, shard: int, tokens: list[int]) -> Lease:
    """Of a request whose tokens are all computed."""
    got = cache.shards[shard].admit(array(tokens))
    assert got is not None and cache.shards[shard].grow(got, got.prefix_len, len(tokens))
    return got


def cached(cache: ShardedCache, shard: int, tokens: list[int]) -> None:
    """Computed once, and kept by the tree."""
    cache.release(lease(cache, shard, tokens), array(tokens))


# --- rows and pages


def test_rows_say_in_which_shard_they_are() -> None:
    cache = make_cache(3)
    leases = [lease(cache, shard, [7, 8]) for shard in (2, 0, 1, 1)]
    assert [one.row for one in leases] == [4, 0, 2, 3]
    assert [cache.of(one.row) for one in leases] == [cache.shards[shard] for shard in (2, 0, 1, 1)]
    assert cache.shards[1].admit(array([1])) is None and cache.shards[0].free_rows == 1
    parts = cache.by_shard(array([3, 4, 0, 2]))
    assert [shard for shard, _ in parts] == list(cache.shards)
    assert [rows.tolist() for _, rows in parts] == [[0], [3, 2], [4]]
    assert [rows.tolist() for _, rows in make_cache(1).by_shard(array([1, 0]))] == [[1, 0]]


def test_updates_name_the_rows_of_all_and_the_pages_of_each() -> None:
    cache = make_cache(2)
    assert len(cache.drain_page_updates()) == 0
    lease(cache, 0, [1, 2])
    lease(cache, 1, [3])
    updates = cache.drain_page_updates()
    assert updates.rows.tolist() == [0, 0, 2] and updates.index.tolist() == [0, 1, 0]
    assert updates.pages.tolist() == [0, 1, 0]
    assert len(cache.drain_page_updates()) == 0


def test_shards_must_divide_the_rows_in_order() -> None:
    shards = make_cache(2).shards
    with pytest.raises(AssertionError, match="shard 0 has"):
        ShardedCache([shards[1], shards[0]])


def test_rows_grow_in_all_shards_or_in_none() -> None:
    cache = make_cache(2, num_pages=4)
    rows = array([lease(cache, 0, [1, 2]).row, lease(cache, 1, [1, 2, 3]).row])
    assert not cache.grow_rows(rows, array([2, 3]), array([4, 5]))
    assert [shard.free_tokens for shard in cache.shards] == [2, 1]
    assert cache.grow_rows(rows, array([2, 3]), array([4, 4]))
    assert [shard.free_tokens for shard in cache.shards] == [0, 0]


def test_windows_slide_before_anybody_asks_for_room() -> None:
    cache = make_cache(2, num_pages=16, windows=(KVGroup(4, 2),))
    rows = array([lease(cache, shard, [1, 2, 3]).row for shard in (0, 1)])
    for length in range(3, 12):
        assert cache.grow_rows(rows, np.full(2, length), np.full(2, length + 1))


def test_usage_is_that_of_all() -> None:
    cache = make_cache(2, page_size=2, num_snapshots=3, snapshot_interval=2)
    cached(cache, 0, [1, 2, 3, 4])
    lease(cache, 0, [5, 6])
    lease(cache, 1, [5, 6, 7, 8])
    (pool,) = cache.pool_usage()
    assert (pool.used_tokens, pool.evictable_tokens, pool.total_tokens) == (6, 4, 32)
    assert cache.num_cached_tokens == 4
    shards = cache.counts()["attn_dp"]
    assert [shard["num_used_tokens"] for shard in shards] == [2, 4]
    assert [shard["num_running_reqs"] for shard in shards] == [1, 1]
    usage = cache.snapshot_usage()
    assert usage["total"] == 6 and usage["used"] == sum(shard.snapshot_usage()["used"] for shard in cache.shards) > 0


def test_the_longest_match_counts() -> None:
    cache = make_cache(2)
    cached(cache, 0, [1, 2])
    cached(cache, 1, [1, 2, 3, 4])
    match = cache.match(array([1, 2, 3, 9]))
    assert match.length_tokens == 3 and match.node in set(cache.shards[1].tree.nodes())
    assert cache.match(array([5])).length_tokens == 0


def test_all_are_flushed_or_none() -> None:
    cache = make_cache(2)
    cached(cache, 0, [1, 2])
    held = lease(cache, 1, [1])
    assert not cache.flush() and cache.num_cached_tokens == 2
    cache.release(held)
    assert cache.flush() and cache.num_cached_tokens == 0


def test_only_what_is_wrong_is_repaired() -> None:
    cache = make_cache(2)
    for shard in (0, 1):
        cached(cache, shard, [1, 2])
    cache.shards[1].allocator.alloc(2)
    forgotten = lease(cache, 1, [3])
    reports = cache.check()
    assert not reports.is_clean and reports.shards[0].is_clean
    assert "shard 1: " in reports.describe() and reports.shards[1].busy_rows == [forgotten.row]
    cache.repair(reports)
    assert cache.check().is_clean and [shard.free_rows for shard in cache.shards] == [2, 2]
    assert cache.shards[0].num_cached_tokens == 2


# --- events


def test_a_block_is_told_of_once() -> None:
    cache, index = make_cache(2), EventIndex(1)
    assert cache.take_events() == [AllBlocksCleared()]
    cached(cache, 0, [1, 2])
    cached(cache, 1, [1, 2, 3, 4])
    first, second = cache.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.token_ids, second.token_ids) == ([1, 2], [3, 4])
    assert second.parent_block_hash == first.block_hashes[-1]
    index.take_in([first, second])
    cached(cache, 1, [9] * 8)  # there is no room for both
    (stored, removed) = sorted(cache.take_events(), key=lambda event: isinstance(event, BlockRemoved))
    assert isinstance(removed, BlockRemoved) and set(removed.block_hashes) == set(second.block_hashes)
    index.take_in([removed, stored])
    assert cache.flush() and cache.take_events() == [AllBlocksCleared()]
    cached(cache, 1, [1, 2])
    (again,) = cache.take_events()
    assert again == first


def test_of_a_run_only_what_is_new_is_told() -> None:
    def stored(hashes: list[int], parent: int | None) -> BlockStored:
        return BlockStored(hashes, parent, [token for block in hashes for token in (block, -block)], 2, None, "GPU")

    merged = MergedEvents()
    assert merged.merge([[stored([2], 1), stored([4, 5], 3)], []]) == [stored([2], 1), stored([4, 5], 3)]
    assert merged.merge([[], [stored([1, 2, 3, 4, 5, 6], None)]]) == [stored([1], None), stored([3], 2), stored([6], 5)]
    assert merged.merge([[BlockRemoved([2, 4, 5])], []]) == []
    assert merged.merge([[], [BlockRemoved([4, 5, 6])]]) == [BlockRemoved([4, 5, 6])]
    assert merged.merge([[stored([4], 3)], []]) == [stored([4], 3)]


@pytest.mark.parametrize(("num_shards", "page_size"), [(2, 1), (3, 2)])
def test_events_add_up_to_the_trees(num_shards: int, page_size: int) -> None:
    rng = np.random.default_rng(num_shards)
    cache, index = make_cache(num_shards, num_pages=12, page_size=page_size), EventIndex(page_size)
    running: list[tuple[Lease, list[int]]] = []
    for _ in range(600):
        shard = int(rng.integers(num_shards))
        tokens = rng.integers(1, 3, rng.integers(1, 9)).tolist()
        if rng.random() < 0.5 and (got := cache.shards[shard].admit(array(tokens))) is not None:
            if not cache.shards[shard].grow(got, got.prefix_len, len(tokens)):
                cache.release(got)
                continue
            cache.commit(got, array(tokens))
            running.append((got, tokens))
        elif running:
            got, tokens = running.pop(int(rng.integers(len(running))))
            if rng.random() < 0.1:
                cache.discard(got)
            cache.release(got, array(tokens) if rng.random() < 0.7 else None)
        elif rng.random() < 0.2:
            assert cache.flush()
        index.take_in(cache.take_events())
        trees = [set(cached_prefixes(shard.tree, page_size)) for shard in cache.shards]
        assert index.prefixes == set.union(*trees)
    for got, _ in running:
        cache.release(got)
    assert cache.check().is_clean
