"""CacheManager against a model that has no tree: a dictionary of cached prefixes and the contents of every KV slot.

The model writes KV the way launched steps would: the value of a slot stands for the whole sequence up to its token. What
counts is that every row reads, through its page table, exactly the values of its own sequence.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cache_machine import MAX_LEN, MAX_ROWS, CacheMachine, Running, array, check_any_order, prompts
from cached_prefixes import Prefix, cached_prefixes
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from jaxserve.cache import PoolUsage, RadixCache, TreeNode
from jaxserve.cache.eviction import EVICTION_KEYS
from jaxserve.cache.radix_cache import EVICT_SHARE
from jaxserve.config import EVICTION_POLICIES
from jaxserve.runner import KVGroup

NAMESPACES = (None, None, None, "a", "")


@dataclasses.dataclass(eq=False)
class Modelled(Running):
    namespace: str | None
    committed: int = 0  # tokens shared by the last commit, or found at admission
    given_from: int | None = None  # the first token that it was first to share


def pages_to_go(tree: RadixCache, policy: str, missing: int) -> set[int]:
    """What eviction has to drop, by looking at every leaf every time."""
    pages = {node.id: node.pages.tolist() for node in tree.nodes()}
    nodes = {node.id: node for node in tree.nodes()}
    gone: set[int] = set()
    while missing > 0:
        parents = {nodes[i].parent.id for i in pages if nodes[i].parent is not None}
        leaves = [nodes[i] for i in pages if pages[i] and i not in parents and nodes[i].lock_count == 0]
        victim = min(leaves, key=lambda node: (EVICTION_KEYS[policy](node), node.id))
        count = max(missing, len(pages[victim.id]) // EVICT_SHARE)
        gone.update(pages[victim.id][-count:])
        missing -= len(pages[victim.id][-count:])
        pages[victim.id] = pages[victim.id][:-count]
        if not pages[victim.id]:
            del pages[victim.id]
    return gone


class ModelMachine(CacheMachine):
    running: list[Modelled]

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), num_tokens=st.integers(MAX_LEN, 60))
    def create(self, page_size: int, num_tokens: int) -> None:
        self.num_pages = -(-num_tokens // page_size)
        self.make_cache((KVGroup(self.num_pages),), page_size)
        self.cached: dict[Prefix, int] = {}
        self.kv: dict[tuple[int, int], Prefix] = {}  # (page, slot in it) -> the sequence whose last token's KV is there
        self.device_table = np.full(self.cache.page_tables[0].shape, -1, np.int32)

    # --- the model

    def whole(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def longest(self, namespace: str | None, tokens: list[int]) -> int:
        lengths = range(self.page_size, len(tokens) + 1, self.page_size)
        return max((n for n in lengths if (namespace, tuple(tokens[:n])) in self.cached), default=0)

    def locked(self) -> set[Prefix]:
        return {
            (run.namespace, tuple(run.tokens[:n]))
            for run in self.running
            for n in range(self.page_size, run.committed + 1, self.page_size)
            if self.holds_cached(run, n)
        }

    def holds_cached(self, run: Modelled, n: int) -> bool:
        """The page of tokens [n - page_size, n) is the one that others would find."""
        return self.cached.get((run.namespace, tuple(run.tokens[:n]))) == self.row(run)[n // self.page_size - 1]

    def is_on_discarded(self, run: Modelled) -> bool:
        return any(not self.holds_cached(run, n) for n in range(self.page_size, run.committed + 1, self.page_size))

    def discarded_pages(self) -> set[int]:
        shared = {page for run in self.running for page in self.row(run)[: run.committed // self.page_size]}
        return shared - set(self.cached.values())

    def decoding(self) -> list[Modelled]:
        return [run for run in self.running if run.computed == len(run.tokens) and len(run.tokens) <= MAX_LEN - 4]

    def row(self, run: Modelled) -> list[int]:
        return self.cache.page_tables[0][run.lease.row, : run.lease.allocated_len // self.page_size].tolist()

    def write_kv(self, run: Modelled, end: int) -> None:
        """A launched step computes tokens [computed, end)."""
        row = self.row(run)
        others = {page for other in self.running if other is not run for page in self.row(other)}
        for pos in range(run.computed, end):
            page = row[pos // self.page_size]
            assert page not in self.cached.values(), f"token {pos} is written to page {page}, which is shared"
            assert page not in others, f"token {pos} is written to page {page} of another row"
            self.kv[page, pos % self.page_size] = (run.namespace, tuple(run.tokens[: pos + 1]))
        run.computed = end

    def remember(self, run: Modelled, end: int) -> None:
        """What commit has to make of the cached prefixes."""
        if self.disable_radix:
            return
        row, is_found = self.row(run), not self.is_on_discarded(run)
        for n in range(self.page_size, end + 1, self.page_size):
            prefix = (run.namespace, tuple(run.tokens[:n]))
            if is_found and prefix not in self.cached:
                self.cached[prefix] = row[n // self.page_size - 1]
                run.given_from = n - self.page_size if run.given_from is None else run.given_from
        run.committed = max(run.committed, self.whole(end))

    def expect_growth(self, needed: int) -> tuple[bool, set[int]]:
        """Whether `needed` more pages can be had, and which cached pages go for them."""
        free = self.num_pages - self.owned_pages()
        evictable = len(self.cached) - len(self.locked())
        if needed > free + evictable:
            return False, set()
        return True, pages_to_go(self.cache.tree, self.policy, needed - free)

    def forget(self, gone: set[int]) -> None:
        assert not gone & {self.cached[prefix] for prefix in self.locked()}, "a prefix in use was evicted"
        self.cached = {prefix: page for prefix, page in self.cached.items() if page not in gone}

    def owned_pages(self) -> int:
        return len(set(self.cached.values()) | {page for run in self.running for page in self.row(run)})

    # --- what the scheduler does

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts(), priority=st.integers(-1, 2), prefill=st.booleans())
    def admit(self, namespace: str | None, tokens: list[int], priority: int, prefill: bool) -> None:
        lease = self.cache.admit(array(tokens), namespace, priority=priority)
        if len(self.running) == MAX_ROWS:
            assert lease is None
            return
        assert lease is not None
        assert lease.prefix_len == lease.shared_len == lease.allocated_len == self.longest(namespace, tokens[:-1])
        assert lease.row not in [run.lease.row for run in self.running]
        run = Modelled(lease, list(tokens), lease.prefix_len, namespace, lease.prefix_len)
        self.running.append(run)
        if prefill:
            self.compute(run, len(tokens))
            self.share(run, run.computed)

    @precondition(lambda self: len(self.running) < MAX_ROWS)
    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts(), priority=st.integers(-1, 2), keep=st.booleans())
    def serve(self, namespace: str | None, tokens: list[int], priority: int, keep: bool) -> None:
        """A request from its arrival to its end, which most calls should be about."""
        self.admit(namespace, tokens, priority, prefill=True)
        self.end(self.running[-1], keep)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts() | st.just([]))
    def match(self, namespace: str | None, tokens: list[int]) -> None:
        match = self.cache.match(array(tokens), namespace)
        assert match.length_tokens == self.longest(namespace, tokens)

    @precondition(lambda self: any(run.computed < len(run.tokens) for run in self.running))
    @rule(data=st.data())
    def prefill_chunk(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in self.running if run.computed < len(run.tokens)]))
        self.compute(run, data.draw(st.integers(run.computed + 1, len(run.tokens))))

    def compute(self, run: Modelled, end: int) -> None:
        needed = max(-(-end // self.page_size) - len(self.row(run)), 0)
        fits, gone = self.expect_growth(needed)
        assert self.cache.grow(run.lease, 0, end) == fits
        if fits:
            self.forget(gone)
            self.write_kv(run, end)

    @precondition(lambda self: self.decoding())
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One step for all rows whose prompt is computed; now and then several tokens at once."""
        runs = self.decoding()
        new = [
            data.draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=data.draw(st.sampled_from([1, 1, 4]))))
            for _ in runs
        ]
        rows = array([run.lease.row for run in runs])
        lengths = array([len(run.tokens) + len(more) for run, more in zip(runs, new, strict=True)])
        needed = sum(
            -(-int(n) // self.page_size) - len(self.row(run))
            for n, run in zip(lengths, runs, strict=True)
            if n > run.lease.allocated_len
        )
        fits, gone = self.expect_growth(needed)
        assert self.cache.has_room(rows, lengths) == fits
        assert self.cache.grow_rows(rows, rows, lengths) == fits
        if fits:
            self.forget(gone)
            for run, more in zip(runs, new, strict=True):
                run.tokens += more
                self.write_kv(run, len(run.tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.share(run, data.draw(st.sampled_from([run.computed, run.computed // 2])))

    def share(self, run: Modelled, end: int) -> None:
        self.cache.commit(run.lease, array(run.tokens[:end]))
        self.remember(run, end)
        assert run.lease.shared_len == run.committed

    @precondition(lambda self: self.running)
    @rule(data=st.data(), goes_on=st.booleans())
    def discard(self, data: st.DataObject, goes_on: bool) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.cache.discard(run.lease)
        if run.given_from is not None:
            end = run.given_from + self.page_size
            if self.holds_cached(run, end):
                bad = (run.namespace, tuple(run.tokens[:end]))
                self.cached = {key: page for key, page in self.cached.items() if (key[0], key[1][:end]) != bad}
        if not goes_on:
            self.end(run, keep=False)

    def end(self, run: Running, keep: bool) -> None:
        assert isinstance(run, Modelled)
        if keep:
            self.remember(run, run.computed)
        super().end(run, keep)

    @rule()
    def drain(self) -> None:
        updates = self.cache.drain_page_updates()
        order = np.arange(len(updates.rows))[::-1]  # a device scatter has no order
        self.device_table[updates.rows[order], updates.index[order]] = updates.pages[order]
        for run in self.running:
            row = self.row(run)
            assert self.device_table[run.lease.row, : len(row)].tolist() == row

    @precondition(lambda self: self.cached)
    @rule(rarely=st.sampled_from([False] * 9 + [True]))
    def flush(self, rarely: bool) -> None:
        if not rarely:
            return
        assert self.cache.flush() == (not self.running)
        if not self.running:
            self.cached = {}

    @precondition(lambda self: not self.running and self.cached)
    @rule(data=st.data(), kind=st.sampled_from(["leak", "free twice", "free cached", "lease", "count"]))
    def damage_and_repair(self, data: st.DataObject, kind: str) -> None:
        allocator, tree = self.cache.allocator, self.cache.tree
        if kind == "leak" and allocator.num_free:
            allocator.alloc(1)
        elif kind == "free twice" and 0 < allocator.num_free < self.num_pages:
            allocator._stack[allocator.num_free] = allocator._stack[0]
            allocator.num_free += 1
        elif kind == "free cached" and self.cached:
            allocator._stack[allocator.num_free] = data.draw(st.sampled_from(sorted(self.cached.values())))
            allocator.num_free += 1
        elif kind == "lease":
            self.cache.admit(array([0, 0, 1]), None)
        else:
            kind = "count"
            tree.evictable_pages += 1
        report = self.cache.check()
        assert not report.is_clean
        assert report.describe()
        self.cache.repair(report)
        left = cached_prefixes(tree, self.page_size)
        assert left.items() <= self.cached.items()
        if kind != "free cached":
            assert left == self.cached
        self.cached = left

    # --- what must hold at all times

    @invariant()
    def every_page_has_one_owner(self) -> None:
        cache = self.cache
        free = cache.allocator.free_pages().tolist()
        in_tree = list(self.cached.values())
        leased = [page for run in self.running for page in self.row(run)[run.committed // self.page_size :]]
        assert sorted([*free, *in_tree, *leased, *self.discarded_pages()]) == list(range(self.num_pages))

    @invariant()
    def the_tree_is_the_models(self) -> None:
        assert cached_prefixes(self.cache.tree, self.page_size) == self.cached
        assert self.locked() <= self.cached.keys(), "a prefix in use is not cached"

    @invariant()
    def rows_read_their_own_kv(self) -> None:
        for run in self.running:
            row = self.row(run)
            for pos in range(run.computed):
                slot = (row[pos // self.page_size], pos % self.page_size)
                assert self.kv[slot] == (run.namespace, tuple(run.tokens[: pos + 1])), f"row {run.lease.row}, token {pos}"

    @invariant()
    def cached_pages_hold_what_they_claim(self) -> None:
        for (namespace, tokens), page in self.cached.items():
            for slot in range(self.page_size):
                end = len(tokens) - self.page_size + slot + 1
                assert self.kv[page, slot] == (namespace, tokens[:end])

    @invariant()
    def counts_are_right(self) -> None:
        cache = self.cache
        locked = len(self.locked()) * self.page_size
        held = len(self.discarded_pages()) * self.page_size
        total = self.num_pages * self.page_size
        assert cache.tree.protected_pages * cache.page_size == locked + held
        assert cache.evictable_tokens == len(self.cached) * self.page_size - locked
        assert cache.free_tokens == total - self.owned_pages() * self.page_size
        assert cache.available_tokens == cache.free_tokens + cache.evictable_tokens
        assert cache.pool_usage() == (PoolUsage(None, total - cache.available_tokens, cache.evictable_tokens, total),)
        assert cache.free_rows == MAX_ROWS - len(self.running)
        assert all((run.lease.shared_len, run.lease.is_open) == (run.committed, True) for run in self.running)

    @invariant()
    def locks_are_the_leases(self) -> None:
        tree = self.cache.tree
        assert tree.top.lock_count == len(self.running)
        ends = [run.lease.node for run in self.running]
        for node in tree.nodes():
            below = 0
            for end in ends:
                above: TreeNode | None = end
                while above is not None and above is not node:
                    above = above.parent
                below += above is node
            assert node.lock_count == below
            assert node.children or node.lock_count or node in tree._leaves, f"{node!r} can never be evicted"
            assert len(node.key) == len(node.pages) * self.page_size * 4


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_any_order_of_calls(policy: str) -> None:
    check_any_order(ModelMachine, 70, 60, policy=policy)


def test_any_order_of_calls_without_radix() -> None:
    check_any_order(ModelMachine, 30, 60, disable_radix=True)
