import numpy as np
import pytest

from jaxserve.cache.eviction import EVICTION_KEYS
from jaxserve.cache.radix_cache import RadixCache
from jaxserve.cache.run_pages import RunPages
from jaxserve.config import EVICTION_POLICIES


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def put(tree: RadixCache, token_ids: np.ndarray, first_page: int, priority: int = 0) -> None:
    root = tree.acquire(tokens(), None, 0).node
    tree.insert(root, token_ids, RunPages(np.arange(first_page, first_page + len(token_ids), dtype=np.int32)), priority)
    tree.unlock(root)


def use(tree: RadixCache, token_ids: np.ndarray, priority: int = 0) -> None:
    tree.unlock(tree.acquire(token_ids, None, priority).node)


def eviction_order(tree: RadixCache) -> list[int]:
    return [int(tree.evict(1).pages[0]) for _ in range(tree.num_cached_pages)]


def tree_of_singles(policy: str) -> RadixCache:
    """Prompts (0,), (1,), (2,), (3,) on pages 0 to 3, inserted in this order."""
    tree = RadixCache(1, policy)
    for i in range(4):
        put(tree, tokens(i), i)
    return tree


def test_the_options_and_the_policies_are_the_same() -> None:
    assert set(EVICTION_KEYS) == set(EVICTION_POLICIES)


def test_unknown_policy_is_a_user_error() -> None:
    with pytest.raises(ValueError, match=r"radix_eviction_policy must be one of lru, lfu, fifo, priority; got 'mru'\."):
        RadixCache(1, "mru")


def test_lru_evicts_what_was_used_longest_ago() -> None:
    tree = tree_of_singles("lru")
    use(tree, tokens(0))
    tree.match(tokens(1), None)  # a waiting request's prefix counts as used
    assert eviction_order(tree) == [2, 3, 0, 1]


def test_lru_counts_the_end_of_a_use() -> None:
    tree = tree_of_singles("lru")
    running = tree.acquire(tokens(0), None, 0)
    use(tree, tokens(1))
    tree.unlock(running.node)
    assert eviction_order(tree) == [2, 3, 1, 0]


def test_lfu_evicts_what_was_used_least_then_longest_ago() -> None:
    tree = tree_of_singles("lfu")
    for i in (0, 0, 2, 1):
        use(tree, tokens(i))
    tree.match(tokens(3), None)  # waiting is not using
    assert eviction_order(tree) == [3, 2, 1, 0]


def test_fifo_ignores_use() -> None:
    tree = tree_of_singles("fifo")
    for i in (0, 0, 1):
        use(tree, tokens(i))
    assert eviction_order(tree) == [0, 1, 2, 3]


def test_priority_evicts_the_lowest_then_lru() -> None:
    tree = RadixCache(1, "priority")
    for i, priority in enumerate((5, -1, 0, 0)):
        put(tree, tokens(i), i, priority)
    use(tree, tokens(2))
    assert eviction_order(tree) == [1, 3, 2, 0]


def test_priority_of_a_shared_prefix_is_its_most_important_users() -> None:
    tree = RadixCache(1, "priority")
    for i in range(3):
        put(tree, tokens(i), i, 1)
    use(tree, tokens(0), priority=7)
    use(tree, tokens(0), priority=0)
    assert eviction_order(tree) == [1, 2, 0]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_leaves_go_before_what_they_hang_on(policy: str) -> None:
    tree = RadixCache(1, policy)
    put(tree, tokens(1, 2), 0)
    put(tree, tokens(1, 2, 3), 0)
    put(tree, tokens(1, 2, 4), 1)
    order = eviction_order(tree)
    assert sorted(order[:2]) == [2, 3]
    assert order[2:] == [1, 0]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_front_part_of_a_split_keeps_its_merits(policy: str) -> None:
    tree = RadixCache(1, policy)
    put(tree, tokens(1, 2), 0, priority=9)
    for _ in range(3):
        use(tree, tokens(1, 2))
    (whole,) = [node for node in tree.nodes() if len(node.pages)]
    put(tree, tokens(1, 7), 5)  # splits
    front = whole.parent
    assert front is not None
    assert (front.token_ids.tolist(), front.hits, front.priority, front.created) == ([1], 3, 9, whole.created)
    assert front.last_access > whole.last_access


def test_a_locked_leaf_is_passed_over_and_comes_back() -> None:
    tree = tree_of_singles("lru")
    held = tree.acquire(tokens(0), None, 0)
    assert [int(tree.evict(1).pages[0]) for _ in range(2)] == [1, 2]
    tree.unlock(held.node)
    assert eviction_order(tree) == [3, 0]


def test_a_long_leaf_is_eaten_from_its_end() -> None:
    tree = RadixCache(1)
    put(tree, np.arange(100, dtype=np.int32), 0)
    assert tree.evict(1).pages.tolist() == list(range(75, 100))  # a quarter, so that shortening costs little in all
    assert tree.evict(30).pages.tolist() == list(range(45, 75))
    assert tree.match(np.arange(100, dtype=np.int32), None).length_tokens == 45
    assert tree.evictable_pages == 45
    assert tree.evict(45).pages.tolist() == list(range(45))


def test_evicting_everything_takes_what_there_is() -> None:
    tree = tree_of_singles("lru")
    held = tree.acquire(tokens(3), None, 0)
    assert sorted(tree.evict(100).pages.tolist()) == [0, 1, 2]
    assert tree.evict(1).pages.tolist() == []
    tree.unlock(held.node)
    assert tree.evict(100).pages.tolist() == [3]


def test_the_queue_does_not_grow_with_use() -> None:
    tree = tree_of_singles("lru")
    for _ in range(100):
        use(tree, tokens(0))
        tree.match(tokens(1), None)
    assert len(tree._leaves._heap) <= 4
