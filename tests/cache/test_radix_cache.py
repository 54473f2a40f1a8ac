import numpy as np
import pytest

from jaxserve.cache.radix_cache import InsertResult, RadixCache
from jaxserve.cache.run_pages import RunPages


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def put(tree: RadixCache, token_ids: np.ndarray, first_page: int, extra_key: str | None = None) -> InsertResult:
    """Inserts from the root with pages first_page, first_page + 1, ..., leaving nothing locked."""
    root = tree.acquire(tokens(), extra_key, 0).node
    num_pages = len(token_ids) // tree.page_size
    whole = token_ids[: num_pages * tree.page_size]
    result = tree.insert(root, whole, RunPages(np.arange(first_page, first_page + num_pages, dtype=np.int32)), 0)
    tree.unlock(root)
    return result


def prefix_pages(tree: RadixCache, token_ids: np.ndarray, extra_key: str | None = None) -> list[int]:
    """The pages a request with these tokens would get."""
    prefix = tree.acquire(token_ids, extra_key, 0)
    tree.unlock(prefix.node)
    return prefix.pages.pages.tolist()


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 128])
def test_longest_whole_page_prefix_matches(page_size: int) -> None:
    tree = RadixCache(page_size)
    stored = np.arange(5 * page_size, dtype=np.int32)
    put(tree, stored, 10)
    for length in range(len(stored) + 1):
        assert tree.match(stored[:length], None).length_tokens == length // page_size * page_size
    for wrong_at in range(len(stored)):
        prompt = stored.copy()
        prompt[wrong_at] = 999
        assert tree.match(prompt, None).length_tokens == wrong_at // page_size * page_size
        assert prefix_pages(tree, prompt) == list(range(10, 10 + wrong_at // page_size))


def test_match_changes_no_node() -> None:
    tree = RadixCache(1)
    put(tree, tokens(1, 2, 3, 4), 0)
    (node,) = [n for n in tree.nodes() if len(n.pages)]
    match = tree.match(tokens(1, 2, 9), None)
    assert (match.length_tokens, match.node) == (2, node)
    assert len(list(tree.nodes())) == 2  # the namespace's root and the one run
    assert tree.match(tokens(5), None).node is node.parent
    assert tree.match(tokens(1, 2), "other").node is tree.top
    assert "other" not in tree.top.children


def test_a_shared_prefix_is_stored_once() -> None:
    tree = RadixCache(2)
    put(tree, tokens(1, 2, 3, 4, 5, 6), 0)
    result = put(tree, tokens(1, 2, 3, 4, 7, 8), 10)
    assert result.existing_pages.tolist() == [0, 1]
    assert result.node.token_ids.tolist() == [7, 8]
    assert result.node.pages.tolist() == [12]
    assert prefix_pages(tree, tokens(1, 2, 3, 4, 5, 6)) == [0, 1, 2]
    assert prefix_pages(tree, tokens(1, 2, 3, 4, 7, 8)) == [0, 1, 12]
    assert tree.num_cached_pages == 4


def test_pages_whose_first_tokens_agree_are_still_different_pages() -> None:
    tree = RadixCache(4)
    put(tree, tokens(1, 2, 3, 4), 0)
    put(tree, tokens(1, 2, 3, 5), 1)
    assert prefix_pages(tree, tokens(1, 2, 3, 4)) == [0]
    assert prefix_pages(tree, tokens(1, 2, 3, 5)) == [1]
    assert prefix_pages(tree, tokens(1, 2, 3, 6)) == []


def test_inserting_a_prefix_of_what_is_there_adds_nothing() -> None:
    tree = RadixCache(1)
    put(tree, tokens(1, 2, 3), 0)
    result = put(tree, tokens(1, 2), 10)
    assert result.existing_pages.tolist() == [0, 1]
    assert result.node.token_ids.tolist() == [1, 2]
    assert tree.num_cached_pages == 3


def test_namespaces_do_not_see_each_other_and_vanish_when_empty() -> None:
    tree = RadixCache(1)
    put(tree, tokens(1, 2), 0)
    put(tree, tokens(1, 2), 10, extra_key="a")
    put(tree, tokens(1, 2), 20, extra_key="")
    assert [prefix_pages(tree, tokens(1, 2), key) for key in (None, "a", "", "b")] == [[0, 1], [10, 11], [20, 21], []]
    assert set(tree.top.children) == {None, "a", ""}
    assert sorted(tree.evict(6).pages.tolist()) == [0, 1, 10, 11, 20, 21]
    assert not tree.top.children


def test_splitting_a_locked_node_keeps_both_parts_locked() -> None:
    tree = RadixCache(1)
    put(tree, tokens(1, 2, 3, 4), 0)
    whole = tree.acquire(tokens(1, 2, 3, 4), None, 0)
    front = tree.acquire(tokens(1, 2, 9), None, 0)
    assert front.node is whole.node.parent
    assert (front.node.lock_count, whole.node.lock_count) == (2, 1)
    assert (tree.protected_pages, tree.evictable_pages) == (4, 0)
    assert len(tree.evict(4).pages) == 0
    tree.unlock(whole.node)
    assert (tree.protected_pages, tree.evictable_pages) == (2, 2)
    assert sorted(tree.evict(4).pages.tolist()) == [2, 3]
    tree.unlock(front.node)
    assert (tree.protected_pages, tree.evictable_pages) == (0, 2)


def test_locks_move_down_without_counting_the_path_twice() -> None:
    tree = RadixCache(1)
    start = tree.acquire(tokens(), None, 0).node
    first = tree.insert(start, tokens(1, 2), RunPages(np.array([0, 1], np.int32)), 0).node
    tree.lock(first, until=start)
    second = tree.insert(first, tokens(3), RunPages(np.array([2], np.int32)), 0).node
    tree.lock(second, until=first)
    assert [start.lock_count, first.lock_count, second.lock_count, tree.top.lock_count] == [1, 1, 1, 1]
    tree.unlock(second)
    assert [start.lock_count, first.lock_count, second.lock_count, tree.top.lock_count] == [0, 0, 0, 0]
    with pytest.raises(AssertionError, match="nobody locked"):
        tree.unlock(second)


def test_lock_stops_only_at_a_node_above() -> None:
    tree = RadixCache(1)
    one, two = put(tree, tokens(1), 0).node, put(tree, tokens(2), 1).node
    with pytest.raises(AssertionError, match="not above"):
        tree.lock(one, until=two)


def test_inserted_pages_are_a_copy() -> None:
    tree = RadixCache(1)
    start = tree.acquire(tokens(), None, 0).node
    table = np.arange(5, dtype=np.int32)
    result = tree.insert(start, tokens(1, 2), RunPages(table[1:3]), 0)
    table[:] = 9
    assert result.node.pages.tolist() == [1, 2]


def test_a_very_deep_tree_needs_no_recursion() -> None:
    tree = RadixCache(1)
    prompt = np.arange(3000, dtype=np.int32)
    node = tree.acquire(tokens(), None, 0).node
    for i in range(len(prompt)):
        below = tree.insert(node, prompt[i : i + 1], RunPages(np.array([i], np.int32)), 0).node
        tree.lock(below, until=node)
        node = below
    tree.unlock(node)
    assert prefix_pages(tree, prompt) == list(range(3000))
    assert sum(len(n.pages) for n in tree.nodes()) == 3000
    assert tree.evict(2999).pages.tolist() == list(range(2999, 0, -1))


def test_tokens_and_pages_must_fit_each_other() -> None:
    tree = RadixCache(2)
    start = tree.acquire(tokens(), None, 0).node
    with pytest.raises(AssertionError, match="4 tokens for 1 pages of 2"):
        tree.insert(start, tokens(1, 2, 3, 4), RunPages(np.array([0], np.int32)), 0)


def test_rebuild_drops_bad_pages_with_all_below_and_all_locks() -> None:
    tree = RadixCache(1)
    put(tree, tokens(1, 2), 0)
    put(tree, tokens(1, 2, 3), 0)
    put(tree, tokens(5, 6), 10)
    put(tree, tokens(7), 20, extra_key="gone")
    tree.acquire(tokens(5, 6), None, 0)
    tree.evictable_pages = 77
    tree.rebuild(RunPages(np.array([1, 20], np.int32)))
    assert prefix_pages(tree, tokens(1, 2, 3)) == []
    assert prefix_pages(tree, tokens(5, 6)) == [10, 11]
    assert (tree.protected_pages, tree.evictable_pages) == (0, 2)
    assert set(tree.top.children) == {None}
    assert sorted(tree.evict(9).pages.tolist()) == [10, 11]
