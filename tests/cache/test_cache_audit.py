import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.runner import KVGroup


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def cached() -> CacheManager:
    """8 pages of one token: [1, 2] cached on two of them, [5] in namespace "a" on a third, the rest free."""
    cache = CacheManager(groups=(KVGroup(8),), page_size=1, max_rows=4, max_pages_per_row=8)
    for prompt, extra_key in ((tokens(1, 2), None), (tokens(5), "a")):
        lease = cache.admit(prompt, extra_key)
        assert lease is not None
        assert cache.grow(lease, 0, len(prompt))
        cache.release(lease, prompt)
    return cache


def repaired(cache: CacheManager) -> CacheManager:
    report = cache.check()
    assert not report.is_clean
    cache.repair(report)
    after = cache.check()
    assert after.is_clean, after.describe()
    assert cache.free_tokens + cache.evictable_tokens == 8
    assert cache.free_rows == 4
    return cache


def test_clean_books() -> None:
    cache = cached()
    report = cache.check()
    assert report.is_clean
    assert report.describe() == "KV cache of 8 pages: no leaks"
    cache.repair(report)
    assert cache.match(tokens(1, 2)).length_tokens == 2


def test_a_leaked_page_comes_back() -> None:
    cache = cached()
    leaked = cache.allocator.alloc(2)
    report = cache.check()
    assert report.full.leaked.tolist() == sorted(leaked.tolist())
    assert "2 leaked pages (3, 4)" in report.describe()
    assert repaired(cache).match(tokens(1, 2)).length_tokens == 2


def test_a_page_freed_twice_is_free_once() -> None:
    cache = cached()
    page = cache.allocator.alloc(1)[0]
    cache.allocator._stack[cache.allocator.num_free : cache.allocator.num_free + 2] = page
    cache.allocator.num_free += 2
    report = cache.check()
    assert report.full.shared.tolist() == [page]
    assert "1 pages owned more than once" in report.describe()
    assert repaired(cache).match(tokens(1, 2)).length_tokens == 2


def test_a_cached_page_that_was_freed_is_not_trusted() -> None:
    cache = cached()
    page = next(node for node in cache.tree.nodes() if node.token_ids.tolist() == [1, 2]).pages[1]
    cache.allocator._stack[cache.allocator.num_free] = page
    cache.allocator.num_free += 1
    cache = repaired(cache)
    assert cache.match(tokens(1, 2)).length_tokens == 0
    assert cache.match(tokens(5), "a").length_tokens == 1


def test_two_nodes_with_one_page_both_go() -> None:
    cache = cached()
    one, two = [node for node in cache.tree.nodes() if len(node.pages)]
    one.pages[0] = two.pages[0]
    cache = repaired(cache)
    assert cache.evictable_tokens == 0


def test_a_page_that_does_not_exist() -> None:
    cache = cached()
    next(node for node in cache.tree.nodes() if node.token_ids.tolist() == [5]).pages[0] = 99
    report = cache.check()
    assert report.full.foreign.tolist() == [99]
    cache = repaired(cache)
    assert cache.match(tokens(5), "a").length_tokens == 0
    assert cache.match(tokens(1, 2)).length_tokens == 2


def test_a_forgotten_lease_is_ended() -> None:
    cache = cached()
    lease = cache.admit(tokens(1, 2, 3))
    assert lease is not None
    assert cache.grow(lease, 0, 5)
    report = cache.check()
    assert report.busy_rows == [lease.row]
    assert report.locked_nodes > 0
    assert len(report.full.leaked) == 3
    assert "request rows not released (0)" in report.describe()
    cache = repaired(cache)
    assert not lease.is_open
    assert cache.evictable_tokens == 3


def test_wrong_counters_are_counted_again() -> None:
    cache = cached()
    cache.tree.evictable_pages += 2
    cache.tree.protected_pages -= 1
    report = cache.check()
    assert report.wrong_counts == [
        "-1 pages counted as protected, there are 0",
        "5 pages counted as evictable, there are 3",
    ]
    repaired(cache)


def test_a_long_list_is_shortened() -> None:
    cache = CacheManager(groups=(KVGroup(100),), page_size=1, max_rows=4, max_pages_per_row=8)
    cache.allocator.alloc(100)
    assert "100 leaked pages (0, 1, 2, 3, 4, 5, 6, 7, ...)" in cache.check().describe()


def test_serving_goes_on_after_a_repair() -> None:
    cache = cached()
    cache.allocator.alloc(5)
    cache = repaired(cache)
    lease = cache.admit(tokens(1, 2, 3))
    assert lease is not None
    assert lease.prefix_len == 2
    assert cache.grow(lease, 0, 8)  # evicts namespace "a"
    cache.release(lease, np.arange(1, 9, dtype=np.int32))
    assert cache.check().is_clean
    assert cache.evictable_tokens == 8
