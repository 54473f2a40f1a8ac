import numpy as np
import pytest

from jaxserve.cache import CacheManager, Lease
from jaxserve.runner import KVGroup


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def manager(num_pages: int = 16, page_size: int = 2, **options: object) -> CacheManager:
    return CacheManager(groups=(KVGroup(num_pages),), page_size=page_size, max_rows=4, max_pages_per_row=8, **options)  # type: ignore[arg-type]


def start(cache: CacheManager, prompt: np.ndarray, extra_key: str | None = None) -> Lease:
    """A request whose prompt has been prefilled and committed."""
    lease = admitted(cache, prompt, extra_key)
    assert cache.grow(lease, 0, len(prompt))
    cache.commit(lease, prompt)
    return lease


def admitted(cache: CacheManager, prompt: np.ndarray, extra_key: str | None = None) -> Lease:
    lease = cache.admit(prompt, extra_key)
    assert lease is not None
    return lease


def pages_of(cache: CacheManager, lease: Lease) -> list[int]:
    return cache.page_tables[0][lease.row, : lease.allocated_len // cache.page_size].tolist()


def budget(cache: CacheManager) -> tuple[int, int, int, int]:
    assert cache.available_tokens == cache.free_tokens + cache.evictable_tokens
    (pool,) = cache.pool_usage()
    assert pool.evictable_tokens == cache.evictable_tokens
    return cache.free_tokens, cache.evictable_tokens, cache.tree.protected_pages * cache.page_size, pool.used_tokens


def test_life_of_one_request() -> None:
    cache = manager()
    prompt = tokens(1, 2, 3, 4, 5)
    lease = admitted(cache, prompt)
    assert (lease.prefix_len, lease.shared_len, lease.allocated_len) == (0, 0, 0)
    assert cache.grow(lease, 0, 5)
    assert lease.allocated_len == 6
    assert budget(cache) == (26, 0, 0, 6)
    cache.commit(lease, prompt)
    assert lease.shared_len == 4  # the half-filled page stays the request's own
    assert budget(cache) == (26, 0, 4, 6)
    assert cache.grow_rows(tokens(lease.row), tokens(6), tokens(7))
    assert lease.allocated_len == 8
    cache.release(lease, tokens(1, 2, 3, 4, 5, 6, 7))
    assert lease.allocated_len == 0
    assert budget(cache) == (26, 6, 0, 0)
    assert cache.match(tokens(1, 2, 3, 4, 5, 6, 7)).length_tokens == 6
    assert cache.check().is_clean


def test_a_second_request_reads_the_first_ones_pages() -> None:
    cache = manager()
    first = start(cache, tokens(1, 2, 3, 4, 5))
    second = admitted(cache, tokens(1, 2, 3, 4, 9))
    assert second.prefix_len == second.shared_len == 4
    assert pages_of(cache, second) == pages_of(cache, first)[:2]
    assert cache.tree.protected_pages * cache.page_size == 4


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4)])
def test_at_least_one_token_is_left_to_compute(length: int, cached: int) -> None:
    cache = manager()
    prompt = tokens(1, 2, 3, 4, 5, 6)
    cache.release(start(cache, prompt))
    assert admitted(cache, prompt[:length]).prefix_len == cached


def test_duplicates_give_way_to_the_trees_pages() -> None:
    cache = manager()
    prompt = tokens(1, 2, 3, 4, 5)
    first, second = admitted(cache, prompt), admitted(cache, prompt)  # both in one prefill batch: nothing cached yet
    assert cache.grow(first, 0, 5)
    assert cache.grow(second, 0, 5)
    cache.drain_page_updates()
    cache.commit(first, prompt)
    own = pages_of(cache, second)
    free_before = cache.free_tokens
    cache.commit(second, prompt)
    assert pages_of(cache, second) == [*pages_of(cache, first)[:2], own[2]]
    assert cache.free_tokens == free_before + 4
    assert second.node is first.node
    updates = cache.drain_page_updates()
    assert updates.rows.tolist() == [second.row] * 2
    assert updates.index.tolist() == [0, 1]
    assert updates.pages.tolist() == pages_of(cache, first)[:2]
    cache.release(first, prompt)
    cache.release(second, prompt)
    assert cache.check().is_clean


def test_duplicates_of_a_part_only() -> None:
    cache = manager()
    first, second = admitted(cache, tokens(1, 2, 3, 4, 5, 6)), admitted(cache, tokens(1, 2, 3, 4, 7, 8))
    assert cache.grow(first, 0, 6)
    assert cache.grow(second, 0, 6)
    cache.commit(first, tokens(1, 2, 3, 4, 5, 6))
    own = pages_of(cache, second)
    cache.commit(second, tokens(1, 2, 3, 4, 7, 8))
    assert pages_of(cache, second) == [*pages_of(cache, first)[:2], own[2]]
    assert second.shared_len == 6
    assert cache.tree.protected_pages * cache.page_size == 8
    cache.release(first)
    assert (cache.tree.protected_pages * cache.page_size, cache.evictable_tokens) == (6, 2)
    cache.release(second)
    assert cache.check().is_clean


def test_a_prompt_in_chunks() -> None:
    cache = manager(page_size=4)
    prompt = np.arange(10, dtype=np.int32)
    lease = admitted(cache, prompt)
    for end, shared in ((3, 0), (6, 4), (10, 8)):
        assert cache.grow(lease, 0, end)
        cache.commit(lease, prompt[:end])
        assert lease.shared_len == shared
        assert cache.match(prompt).length_tokens == shared
    assert lease.prefix_len == 0
    cache.release(lease)  # aborted: what the chunks committed stays cached
    assert budget(cache) == (56, 8, 0, 0)
    assert cache.check().is_clean


def test_someone_else_splits_a_leased_prefix() -> None:
    cache = manager()
    long = start(cache, tokens(1, 2, 3, 4, 5, 6))
    short = admitted(cache, tokens(1, 2, 9))
    assert short.prefix_len == 2
    assert cache.grow(long, 0, 8)
    cache.commit(long, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    assert cache.match(tokens(1, 2, 3, 4, 5, 6, 7, 8)).length_tokens == 8
    cache.release(long)
    assert (cache.tree.protected_pages * cache.page_size, cache.evictable_tokens) == (2, 6)
    cache.release(short)
    assert cache.check().is_clean


def test_growing_evicts_what_nobody_uses() -> None:
    cache = manager(num_pages=4)
    cache.release(start(cache, tokens(1, 2, 3, 4)))
    held = start(cache, tokens(5, 6, 7))
    assert budget(cache) == (0, 4, 2, 4)
    assert not cache.grow(held, 0, 9)
    assert budget(cache) == (0, 4, 2, 4)  # nothing was evicted in vain
    assert cache.grow(held, 0, 7)
    assert budget(cache) == (0, 0, 2, 8)
    assert cache.match(tokens(5, 6)).length_tokens == 2
    assert not cache.grow(held, 0, 10)


def test_admission_right_after_eviction_gets_no_stale_prefix() -> None:
    cache = manager(num_pages=3)
    cache.release(start(cache, tokens(1, 2, 3, 4)))
    other = admitted(cache, tokens(7, 8))
    assert cache.grow(other, 0, 6)
    again = admitted(cache, tokens(1, 2, 3, 4, 5))
    assert again.prefix_len == 0
    assert not cache.grow(again, 0, 2)
    cache.release(again)
    cache.release(other)
    assert cache.check().is_clean


def test_rows_run_out() -> None:
    cache = manager()
    leases = [admitted(cache, tokens(i)) for i in range(4)]
    assert cache.free_rows == 0
    assert cache.admit(tokens(9)) is None
    cache.release(leases[2])
    assert admitted(cache, tokens(9)).row == leases[2].row


@pytest.mark.parametrize("page_size", [1, 3])
def test_grow_rows_is_all_or_nothing(page_size: int) -> None:
    cache = CacheManager(groups=(KVGroup(9),), page_size=page_size, max_rows=4, max_pages_per_row=8)
    leases = [admitted(cache, tokens(i)) for i in range(3)]
    rows = np.array([lease.row for lease in leases], np.int32)
    first = np.full(3, page_size, np.int32)
    assert cache.has_room(rows, first)
    assert cache.grow_rows(rows, rows, first)
    assert cache.grow_rows(rows, rows, first)
    some = first + np.array([0, 1, 0], np.int32)
    assert cache.grow_rows(rows, rows, some)
    assert [lease.allocated_len for lease in leases] == [page_size, 2 * page_size, page_size]
    many = np.array([4, 2, 4], np.int32) * page_size
    assert not cache.has_room(rows, many)
    assert not cache.grow_rows(rows, rows, many)
    assert cache.grow_rows(rows, rows, many - np.array([page_size, 0, 0], np.int32))
    held = sorted(page for lease in leases for page in pages_of(cache, lease))
    assert held == list(range(9))
    assert not cache.grow_rows(rows[:1], rows[:1], many[:1])
    assert cache.grow_rows(rows[:0], rows[:0], many[:0])


def test_page_updates_rebuild_the_table() -> None:
    cache = CacheManager(groups=(KVGroup(64),), page_size=1, max_rows=4, max_pages_per_row=16)
    device = np.full((4, 16), -1, np.int32)
    first, second = admitted(cache, np.arange(6, dtype=np.int32)), admitted(cache, np.arange(6, dtype=np.int32))
    for step in range(1, 9):
        assert cache.grow_rows(np.array([first.row, second.row]), np.array([0, 0]), np.array([step, step]))
        if step == 6:
            cache.commit(first, np.arange(6, dtype=np.int32))
            cache.commit(second, np.arange(6, dtype=np.int32))
        updates = cache.drain_page_updates()
        device[updates.rows[::-1], updates.index[::-1]] = updates.pages[::-1]  # any order will do
        for lease in (first, second):
            assert device[lease.row, :step].tolist() == pages_of(cache, lease)
    assert pages_of(cache, first)[:6] == pages_of(cache, second)[:6]


def test_without_radix_nothing_is_shared() -> None:
    cache = manager(disable_radix=True)
    prompt = tokens(1, 2, 3, 4, 5)
    lease = start(cache, prompt)
    assert lease.shared_len == 0
    assert cache.match(prompt).length_tokens == 0
    other = start(cache, prompt, "key")
    assert other.prefix_len == 0
    assert not set(pages_of(cache, lease)) & set(pages_of(cache, other))
    cache.release(lease, prompt)
    cache.release(other, prompt)
    assert budget(cache) == (32, 0, 0, 0)
    assert cache.check().is_clean


def test_flush_waits_for_the_last_lease() -> None:
    cache = manager()
    cache.release(start(cache, tokens(1, 2, 3)), tokens(1, 2, 3))
    lease = start(cache, tokens(4, 5, 6))
    assert not cache.flush()
    assert cache.match(tokens(1, 2)).length_tokens == 2
    cache.release(lease)
    assert cache.flush()
    assert cache.match(tokens(1, 2)).length_tokens == 0
    assert budget(cache) == (32, 0, 0, 0)
    assert cache.check().is_clean


def test_a_lease_ends_once() -> None:
    cache = manager()
    lease = start(cache, tokens(1, 2, 3))
    cache.release(lease)
    with pytest.raises(AssertionError, match="row 0 released twice"):
        cache.release(lease)
    with pytest.raises(AssertionError, match="after its release"):
        cache.grow(lease, 0, 4)
    with pytest.raises(AssertionError, match="after its release"):
        cache.commit(lease, tokens(1, 2))


def test_only_tokens_with_pages_can_be_committed() -> None:
    cache = manager()
    lease = start(cache, tokens(1, 2, 3))
    with pytest.raises(AssertionError, match="5 tokens, row 0 holds 4"):
        cache.commit(lease, tokens(1, 2, 3, 4, 5))
    with pytest.raises(AssertionError, match="more than 8"):
        cache.grow(lease, 0, 17)


def test_priority_reaches_the_tree() -> None:
    cache = CacheManager(groups=(KVGroup(4),), page_size=1, max_rows=4, max_pages_per_row=8, eviction_policy="priority")
    for token, priority in ((1, 3), (2, 1)):
        lease = cache.admit(tokens(token), priority=priority)
        assert lease is not None
        assert cache.grow(lease, 0, 1)
        cache.release(lease, tokens(token))
    assert cache.grow(admitted(cache, tokens(9)), 0, 3)
    assert cache.match(tokens(1)).length_tokens == 1
    assert cache.match(tokens(2)).length_tokens == 0


# --- discard


def test_what_was_discarded_is_not_matched_again() -> None:
    cache = manager()
    cache.release(start(cache, tokens(1, 2)))
    bad = start(cache, tokens(1, 2, 3, 4, 5, 6))
    cache.release(start(cache, tokens(1, 2, 3, 4, 7, 8)))  # stands on what the bad one brought
    cache.discard(bad)
    assert cache.match(tokens(1, 2, 3, 4, 5, 6)).length_tokens == 2
    assert cache.match(tokens(1, 2, 3, 4, 7, 8)).length_tokens == 2
    assert budget(cache) == (26, 0, 6, 6)
    cache.release(bad)
    assert budget(cache) == (30, 2, 0, 0)
    assert cache.check().is_clean


def test_nothing_to_discard() -> None:
    cache = manager()
    cache.release(start(cache, tokens(1, 2, 3, 4)))
    guest = start(cache, tokens(1, 2, 3, 4, 5))
    cache.discard(guest)
    assert cache.match(tokens(1, 2, 3, 4)).length_tokens == 4
    cache.release(guest)
    assert cache.check().is_clean


def test_others_keep_what_they_share_with_a_discarded_prefix() -> None:
    cache = manager()
    bad = start(cache, tokens(1, 2, 3, 4))
    other = start(cache, tokens(1, 2, 3, 4, 5, 6, 7))
    held = pages_of(cache, other)
    cache.discard(bad)
    cache.release(bad)
    again = start(cache, tokens(1, 2, 3, 4, 5, 6))
    assert again.prefix_len == 0 and not set(pages_of(cache, again)) & set(held)
    assert pages_of(cache, other) == held
    assert cache.grow(other, 0, 10)
    cache.commit(other, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9))  # nobody finds it, and it goes with its owner
    assert cache.match(tokens(1, 2, 3, 4, 5, 6, 7, 8)).length_tokens == 6
    cache.release(other, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    assert budget(cache) == (26, 0, 6, 6)
    cache.release(again)
    assert cache.check().is_clean


def test_discarding_twice_and_below() -> None:
    cache = manager()
    first = start(cache, tokens(1, 2, 3, 4))
    second = start(cache, tokens(1, 2, 3, 4, 5, 6))
    cache.discard(second)
    cache.discard(first)
    cache.discard(first)
    cache.release(first)
    cache.release(second)
    assert budget(cache) == (32, 0, 0, 0)
    assert cache.check().is_clean
