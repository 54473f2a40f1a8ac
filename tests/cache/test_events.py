"""KV cache events of the tree: what is told when, and by which hashes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from event_index import EventIndex, expected_hash
from test_radix_cache import put, tokens

from jaxserve.cache import CacheManager, RadixCache
from jaxserve.cache.events import MOST_BLOCKS, AllBlocksCleared, BlockRemoved, BlockStored, EventRecorder
from jaxserve.namespaces import cache_namespace
from jaxserve.runner import NO_TOKEN_ID, KVGroup


def recorded(page_size: int) -> tuple[RadixCache, EventRecorder]:
    """An empty tree, of which that has been told."""
    events = EventRecorder(page_size)
    tree = RadixCache(page_size, events=events)
    assert events.take() == [AllBlocksCleared()]
    return tree, events


def test_hashes_are_sglangs() -> None:
    """The numbers are those that its router is tested with."""
    tree, events = recorded(4)
    put(tree, tokens(1, 2, 3, 4, 5), 0)
    assert events.take() == [BlockStored([-3488128144981237669], None, [1, 2, 3, 4], 4, None, "GPU")]
    tree, events = recorded(2)
    put(tree, tokens(10, 20, 30, 40, 50, 60, 70, 80), 0)
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [978178666101069530, -895308556211281782, -8033692805846017938, 835415944263129316]


@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_prefixes_are_stored_once_and_a_split_says_nothing(page_size: int) -> None:
    tree, events = recorded(page_size)
    common = list(range(8 * page_size))
    put(tree, tokens(*common, *range(500, 500 + 2 * page_size)), 0)
    (first,) = events.take()
    assert isinstance(first, BlockStored) and len(first.block_hashes) == 10
    tree.unlock(tree.acquire(tokens(*common[: 5 * page_size]), None, 0).node)
    assert len([node for node in tree.nodes() if len(node.pages)]) == 2, "it was split"
    assert events.take() == []
    put(tree, tokens(*common, *range(600, 600 + page_size)), 20)
    (second,) = events.take()
    assert second == BlockStored(
        [expected_hash((*common, *range(600, 600 + page_size)), page_size)],
        first.block_hashes[7],
        list(range(600, 600 + page_size)),
        page_size,
        None,
        "GPU",
    )
    put(tree, tokens(*common), 30)
    assert events.take() == []


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_evicted_is_removed_from_the_end(page_size: int) -> None:
    tree, events = recorded(page_size)
    index = EventIndex(page_size)
    put(tree, np.arange(8 * page_size, dtype=np.int32), 0)
    (stored,) = taken = events.take()
    assert isinstance(stored, BlockStored)
    index.take_in(taken)
    assert tree.evict(3).pages.tolist() == [5, 6, 7]
    assert events.take() == [BlockRemoved(stored.block_hashes[5:], "GPU")]
    put(tree, np.arange(7 * page_size, dtype=np.int32), 20)
    (again,) = events.take()
    assert isinstance(again, BlockStored)
    assert (again.block_hashes, again.parent_block_hash) == (stored.block_hashes[5:7], stored.block_hashes[4])
    tree.evict(100)
    removed = [block_hash for event in events.take() if isinstance(event, BlockRemoved) for block_hash in event.block_hashes]
    assert sorted(removed) == sorted(stored.block_hashes[:7])


def test_namespaces_have_hashes_of_their_own() -> None:
    tree, events = recorded(1)
    hashes = set()
    for namespace, salt in [
        (None, None),
        (cache_namespace(None, "tenant-a"), "tenant-a"),
        (cache_namespace("key", None), '["key", null]'),
        (cache_namespace("key", "tenant-a"), '["key", "tenant-a"]'),
    ]:
        put(tree, tokens(1, 2, 3, 4), 0, namespace)
        put(tree, tokens(1, 2, 7), 0, namespace)
        index = EventIndex(1)
        index.take_in(events.take())
        assert index.prefixes == {(salt, prefix) for prefix in ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 7))}
        hashes |= index.by_hash.keys()
    assert len(hashes) == 20


def test_a_flush_clears_and_hides_what_came_before() -> None:
    cache = CacheManager(groups=(KVGroup(8),), page_size=2, max_rows=2, max_pages_per_row=4, record_events=True)
    lease = cache.admit(tokens(1, 2, 3))
    assert lease is not None and cache.grow(lease, 0, 3)
    cache.release(lease, tokens(1, 2, 3))
    assert [type(event) for event in cache.take_events()] == [AllBlocksCleared, BlockStored]
    assert cache.flush()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.take_events() == []


def test_what_a_request_brought_is_removed_when_it_is_discarded() -> None:
    cache = CacheManager(groups=(KVGroup(8),), page_size=1, max_rows=2, max_pages_per_row=8, record_events=True)
    index = EventIndex(1)
    lease = cache.admit(tokens(1, 2, 3, 4))
    assert lease is not None and cache.grow(lease, 0, 4)
    cache.commit(lease, tokens(1, 2, 3))
    index.take_in(cache.take_events())
    assert len(index.prefixes) == 3
    cache.discard(lease)
    index.take_in(cache.take_events())
    assert not index.prefixes
    cache.release(lease, tokens(1, 2, 3, 4))
    assert cache.take_events() == [], "it is not found by others"


def test_tokens_without_an_id_are_numbers_that_readers_take() -> None:
    tree, events = recorded(1)
    put(tree, tokens(NO_TOKEN_ID, 5), 0, cache_namespace(None, None, "embeds"))
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert event.token_ids == [2**32 - 1, 5]


def test_no_event_is_longer_than_readers_take() -> None:
    tree, events = recorded(1)
    put(tree, np.arange(MOST_BLOCKS + 5, dtype=np.int32), 0)
    tree.evict(MOST_BLOCKS + 5)
    first, rest, *removed = events.take()
    assert isinstance(first, BlockStored) and isinstance(rest, BlockStored)
    assert (len(first.block_hashes), rest.token_ids) == (MOST_BLOCKS, list(range(MOST_BLOCKS, MOST_BLOCKS + 5)))
    assert rest.parent_block_hash == first.block_hashes[-1]
    assert removed == [BlockRemoved(first.block_hashes, "GPU"), BlockRemoved(rest.block_hashes, "GPU")]


def test_fields_are_written_as_sglang_writes_them() -> None:
    assert list(msgspec.to_builtins(BlockStored([1], None, [7], 1, None, "GPU", "salt")).items()) == [
        ("type", "BlockStored"), ("block_hashes", [1]), ("parent_block_hash", None), ("token_ids", [7]), ("block_size", 1),
        ("lora_id", None), ("medium", "GPU"), ("cache_salt", "salt"),
    ]  # fmt: skip
    assert "cache_salt" not in msgspec.to_builtins(BlockStored([1], None, [7], 1, None, "GPU"))
    assert msgspec.to_builtins(BlockRemoved([1], "GPU")) == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    assert msgspec.to_builtins(AllBlocksCleared()) == {"type": "AllBlocksCleared"}


def test_nothing_is_recorded_unless_asked() -> None:
    tree = RadixCache(1)
    put(tree, tokens(1, 2, 3), 0)
    tree.evict(1)
    assert all(node.digests == b"" for node in tree.nodes())
