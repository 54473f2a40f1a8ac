"""CacheManager with window groups, in any order of calls: every step reads, in every group, the KV of its own sequence.

As in test_cache_state_machine, the value of a slot stands for the whole sequence up to its token. A step may read only what
its queries' windows reach into; pages outside hold whatever others wrote.
"""

from __future__ import annotations

import numpy as np
import pytest
from cache_machine import MAX_LEN, MAX_ROWS, CacheMachine, Running, array, check_any_order, prompts
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from jaxserve.cache.page_allocator import NO_PAGE
from jaxserve.config import EVICTION_POLICIES
from jaxserve.runner import KVGroup


class WindowMachine(CacheMachine):
    windows: tuple[int | None, ...] = (None, 5)

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]), num_tokens=st.integers(MAX_LEN, 70), share=st.sampled_from([1.0, 0.5]))
    def create(self, page_size: int, num_tokens: int, share: float) -> None:
        full = -(-num_tokens // page_size)
        least = -(-MAX_LEN // page_size)  # a request that is alone can always go on
        self.groups = tuple(
            KVGroup(full if window is None else max(int(full * share), least), window) for window in self.windows
        )
        self.make_cache(self.groups, page_size)
        self.kv: dict[tuple[int, int, int], tuple[int, ...]] = {}  # (group, page, slot in it) -> the sequence up to its token
        self.device_tables = [np.full(table.shape, -1, np.int32) for table in self.cache.page_tables]

    # --- steps

    def run_step(self, runs: list[Running], ends: list[int]) -> None:
        """A launched step: all rows write, then each reads what its queries see."""
        self.drain()
        for run, end in zip(runs, ends, strict=True):
            for position in range(run.computed, end):
                for group in range(len(self.groups)):
                    self.kv[self.slot(run, group, position)] = tuple(run.tokens[: position + 1])
        for run, end in zip(runs, ends, strict=True):
            for position in range(run.computed, end):
                self.read(run, position)
            run.computed = end

    def read(self, run: Running, query: int) -> None:
        for index, group in enumerate(self.groups):
            for position in range(max(query - (group.window or MAX_LEN) + 1, 0), query + 1):
                assert self.kv[self.slot(run, index, position)] == tuple(run.tokens[: position + 1]), (
                    f"row {run.lease.row}, group {index}: the query at {query} reads another token's KV at {position}"
                )

    def slot(self, run: Running, group: int, position: int) -> tuple[int, int, int]:
        page = int(self.device_tables[group][run.lease.row, position // self.page_size])
        return group, page, position % self.page_size

    def drain(self) -> None:
        updates = self.cache.drain_page_updates()
        for group, row, index, page in zip(updates.groups, updates.rows, updates.index, updates.pages, strict=True):
            self.device_tables[group][row, index] = page

    def compute(self, run: Running, end: int) -> None:
        fits = self.cache.has_room(array([run.lease.row]), array([end]))
        if self.cache.grow(run.lease, run.computed, end):
            self.run_step([run], [end])
        else:
            assert not fits and len(self.running) > 1, "a request that is alone does not fit"

    # --- what the scheduler does

    @precondition(lambda self: len(self.running) < MAX_ROWS)
    @rule(tokens=prompts(), prefill=st.booleans())
    def admit(self, tokens: list[int], prefill: bool) -> None:
        lease = self.cache.admit(array(tokens), None)
        assert lease is not None
        assert lease.prefix_len < len(tokens) and lease.prefix_len % self.page_size == 0
        run = Running(lease, list(tokens), lease.prefix_len)
        self.running.append(run)
        if prefill:
            self.compute(run, len(tokens))
            self.cache.commit(lease, array(tokens[: run.computed]))

    @precondition(lambda self: len(self.running) < MAX_ROWS)
    @rule(tokens=prompts(), outputs=st.integers(0, 6), keep=st.booleans())
    def serve(self, tokens: list[int], outputs: int, keep: bool) -> None:
        """A request from its arrival to its end; then its like finds what it left, unless the pool was short."""
        self.admit(tokens, prefill=True)
        run = self.running[-1]
        if run.computed == len(tokens):
            for _ in range(outputs):
                run.tokens.append(1)
                self.compute(run, len(run.tokens))
                if run.computed < len(run.tokens):
                    run.tokens.pop()
                    break
        self.end(run, keep)
        if keep and not self.disable_radix:
            self.check_left(run)

    def check_left(self, run: Running) -> None:
        """What a request that just ended has left."""
        whole = run.computed // self.page_size * self.page_size
        assert self.cache.match(array(run.tokens[: run.computed])).length_tokens == whole, "what was just used is gone"

    @precondition(lambda self: any(run.computed < len(run.tokens) for run in self.running))
    @rule(data=st.data(), commit=st.booleans())
    def prefill_chunk(self, data: st.DataObject, commit: bool) -> None:
        run = data.draw(st.sampled_from([run for run in self.running if run.computed < len(run.tokens)]))
        self.compute(run, data.draw(st.integers(run.computed + 1, len(run.tokens))))
        if commit:
            self.cache.commit(run.lease, array(run.tokens[: run.computed]))

    @precondition(lambda self: any(run.computed == len(run.tokens) <= MAX_LEN - 4 for run in self.running))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """Several tokens at once now and then; where the step begins is known as a bound only."""
        runs = [run for run in self.running if run.computed == len(run.tokens) <= MAX_LEN - 4]
        new = [data.draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=3)) for _ in runs]
        late = data.draw(st.integers(0, 2))
        ends = [run.computed + len(more) for run, more in zip(runs, new, strict=True)]
        starts = array([max(run.computed - late, 0) for run in runs])
        if self.cache.grow_rows(array([run.lease.row for run in runs]), starts, array(ends)):
            for run, more in zip(runs, new, strict=True):
                run.tokens += more
            self.run_step(runs, ends)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.cache.commit(run.lease, array(run.tokens[: data.draw(st.sampled_from([run.computed, run.computed // 2]))]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), goes_on=st.booleans())
    def discard(self, data: st.DataObject, goes_on: bool) -> None:
        run = data.draw(st.sampled_from(self.running))
        self.cache.discard(run.lease)
        if not goes_on:
            self.end(run, keep=False)

    @rule(rarely=st.sampled_from([False] * 9 + [True]))
    def flush(self, rarely: bool) -> None:
        assert not rarely or self.cache.flush() == (not self.running)

    # --- what must hold at all times

    @invariant()
    def pools_are_what_rows_and_tree_hold(self) -> None:
        tree = self.cache.tree
        usage = self.cache.pool_usage()[-len(self.cache.windows) :]
        for index, group in enumerate(self.cache.windows):
            holds = np.zeros(group.num_pages, np.int32)
            for run in self.running:
                row = run.lease.row
                end = int(self.cache.req_to_token.num_pages[row])
                pages = group.row_pages(row, 0, end)
                held = pages[pages != NO_PAGE]
                np.add.at(holds, held, 1)
                assert len(held) == max(end - int(group.first_page[row]), 0)
            cached = [page for node in tree.nodes() for page in node.windows[index].tolist() if page != NO_PAGE]
            assert len(set(cached)) == len(cached), "a page stands in the tree twice"
            assert np.flatnonzero(group.in_tree).tolist() == sorted(cached)
            assert (group.holds == holds).all()
            used = set(cached) | set(np.flatnonzero(holds).tolist())
            assert sorted(group.free_pages().tolist()) == sorted(set(range(group.num_pages)) - used)
            assert group.num_evictable == sum(holds[page] == 0 for page in cached)
            assert usage[index].used_tokens == np.count_nonzero(holds) * self.page_size

    @invariant()
    def nothing_useless_stays(self) -> None:
        for node in self.cache.tree.nodes():
            if node.children or node.lock_count or node.parent is self.cache.tree.top or node.discarded:
                continue
            needed = [(window or 0) > 1 for window in self.windows if window is not None]
            assert all((own != NO_PAGE).any() for own, needs in zip(node.windows, needed, strict=True) if needs), node


@pytest.mark.parametrize(
    ("windows", "policy"),
    [((None, 5), "lru"), ((None, 1, 7), "lfu"), ((6,), "lru"), ((2, 9), "priority"), ((None, 4), "fifo")],
)
def test_any_order_of_calls(windows: tuple[int | None, ...], policy: str) -> None:
    assert policy in EVICTION_POLICIES
    check_any_order(WindowMachine, 30, 50, windows=windows, policy=policy)


def test_any_order_of_calls_without_radix() -> None:
    check_any_order(WindowMachine, 20, 50, disable_radix=True)
