"""CacheManager with snapshots of states, in any order of calls: every step goes on from the state of its own sequence.

Pages are checked as in test_window_state_machine.
"""

from __future__ import annotations

import numpy as np
import pytest
from cache_machine import MAX_LEN, MAX_ROWS, Running, array, check_any_order
from fake_states import FakeRow, FakeStates
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_window_state_machine import WindowMachine

from jaxserve.cache import CacheManager
from jaxserve.cache.page_allocator import NO_PAGE
from jaxserve.runner import KVGroup

MOST = 3  # tokens that a decode step adds to a row


class SnapshotMachine(WindowMachine):
    windows = (None,)

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        num_tokens=st.integers(MAX_LEN, 70),
        share=st.sampled_from([1.0, 0.5]),
        num_snapshots=st.sampled_from([1, 2, 3, 12]),
        interval=st.sampled_from([1, 4]),
    )
    def create_with_states(self, page_size: int, num_tokens: int, share: float, num_snapshots: int, interval: int) -> None:
        least = -(-MAX_LEN // page_size)
        full = -(-num_tokens // page_size)
        self.groups = tuple(
            KVGroup(full if window is None else max(int(full * share), least), window) for window in self.windows
        )
        self.make_cache(self.groups, page_size, num_snapshots=num_snapshots, snapshot_interval=interval)
        self.kv = {}
        self.device_tables = [np.full(table.shape, -1, np.int32) for table in self.cache.page_tables]
        self.states = FakeStates(2 * MAX_ROWS, self.device_tables[0].shape[1], page_size, len(self.groups), MOST)

    def create(self, page_size: int, num_tokens: int, share: float) -> None:
        """Not this one."""

    def run_step(self, runs: list[Running], ends: list[int], *, in_turn: bool = False) -> None:
        starts = [run.computed for run in runs]
        super().run_step(runs, ends)
        rows = zip(runs, starts, ends, strict=True)
        self.states.run([FakeRow(run.lease.row, start, run.tokens[:end]) for run, start, end in rows], in_turn=in_turn)

    def drain(self) -> None:
        updates = self.cache.drain_page_updates()
        self.states.enter(updates)
        for group, row, index, page in zip(updates.groups, updates.rows, updates.index, updates.pages, strict=True):
            self.device_tables[group][row, index] = page

    def check_left(self, run: Running) -> None:
        """As many as there is room for: not checked here."""

    @precondition(lambda self: any(run.computed == len(run.tokens) <= MAX_LEN - MOST - 1 for run in self.running))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """A token and drafts behind it, of which some are right; where rows stand is known as bounds only."""
        runs = [run for run in self.running if run.computed == len(run.tokens) <= MAX_LEN - MOST - 1]
        new = [data.draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=MOST)) for _ in runs]
        right = [data.draw(st.integers(1, len(tokens))) for tokens in new]
        late, early = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
        starts = array([run.computed for run in runs])
        held = starts + early
        if self.cache.grow_rows(array([run.lease.row for run in runs]), np.maximum(starts - late, 0), held + MOST, held):
            for run, tokens in zip(runs, new, strict=True):
                run.tokens += tokens
            self.run_step(runs, [len(run.tokens) for run in runs], in_turn=True)
            for run, start, count in zip(runs, starts.tolist(), right, strict=True):
                run.computed = start + count
                del run.tokens[run.computed :]

    @invariant()
    def snapshots_are_what_rows_and_tree_hold(self) -> None:
        states = self.cache.states
        assert states is not None
        holds = np.zeros(states.num_pages, np.int32)
        for run in self.running:
            pages = states.row_pages(run.lease.row, 0, int(self.cache.req_to_token.num_pages[run.lease.row]))
            np.add.at(holds, pages[pages != NO_PAGE], 1)
        cached = [page for node in self.cache.tree.nodes() for page in node.windows[-1].tolist() if page != NO_PAGE]
        assert len(set(cached)) == len(cached), "a snapshot stands in the tree twice"
        assert np.flatnonzero(states.in_tree).tolist() == sorted(cached)
        assert (states.holds == holds).all()
        used = set(cached) | set(np.flatnonzero(holds).tolist())
        assert sorted(states.free_pages().tolist()) == sorted(set(range(states.num_pages)) - used)
        assert states.num_evictable == sum(holds[page] == 0 for page in cached)

    @invariant()
    def nothing_useless_stays(self) -> None:
        """Pages behind the last state may: a later prompt may leave one there. They go when pages are short."""


@pytest.mark.parametrize(("windows", "policy"), [((None,), "lru"), ((None, 5), "lfu"), ((6,), "priority")])
def test_any_order_of_calls(windows: tuple[int | None, ...], policy: str) -> None:
    check_any_order(SnapshotMachine, 25, 50, windows=windows, policy=policy)


PAGE = 4


def make(num_snapshots: int = 8, interval: int = 8) -> CacheManager:
    return CacheManager(
        groups=(KVGroup(32),),
        page_size=PAGE,
        max_rows=MAX_ROWS,
        max_pages_per_row=16,
        num_snapshots=num_snapshots,
        snapshot_interval=interval,
    )


def serve(cache: CacheManager, prompt: list[int], outputs: int = 0, chunk: int = 64) -> int:
    """How much of the prompt was cached."""
    lease = cache.admit(array(prompt))
    assert lease is not None
    tokens, start = [*prompt, *range(500, 500 + outputs)], lease.prefix_len
    while start < len(prompt):
        end = min(start + chunk, len(prompt))
        assert cache.grow(lease, start, end)
        cache.commit(lease, array(prompt[:end]))
        start = end
    for end in range(len(prompt) + 1, len(tokens) + 1):
        assert cache.grow_rows(array([lease.row]), array([end - 1]), array([end]))
    cache.release(lease, array(tokens))
    assert cache.check().is_clean
    return lease.prefix_len


def test_the_same_prompt_again_goes_on_before_its_last_token() -> None:
    cache = make()
    for length in (7, 8, 9):
        prompt = [length] * length
        assert serve(cache, prompt) == 0
        assert serve(cache, prompt) == (length - 1) // PAGE * PAGE


def test_chunks_of_a_prompt_can_be_gone_on_behind() -> None:
    cache = make()
    prompt = list(range(20))
    serve(cache, prompt, chunk=8)
    assert cache.match(array([*prompt[:17], 99])).length_tokens == 16
    assert cache.match(array([*prompt[:9], 99])).length_tokens == 8
    assert cache.match(array([*prompt[:15], 99])).length_tokens == 8


def test_a_conversation_goes_on_behind_what_was_generated() -> None:
    cache = make(interval=8)
    prompt = list(range(6))
    serve(cache, prompt, outputs=13)  # 19 tokens: a state behind 16
    assert serve(cache, [*prompt, *range(500, 513), 7, 8]) == 16


def test_the_second_prompt_to_part_from_a_prefix_leaves_a_state_there() -> None:
    cache = make()
    system = list(range(100, 112))
    assert serve(cache, [*system, *range(10)]) == 0
    assert serve(cache, [*system, *range(50, 60)]) == 0  # its tokens are known up to there, its state is not
    assert serve(cache, [*system, *range(70, 80)]) == len(system)


def test_how_full_it_is() -> None:
    cache = make()
    lease = cache.admit(array([1] * 9))
    assert lease is not None and cache.grow(lease, 0, 9)
    assert cache.snapshot_usage() == {"total": 8, "used": 1, "evictable": 0}
    cache.commit(lease, array([1] * 9))
    cache.release(lease)
    assert cache.snapshot_usage() == {"total": 8, "used": 0, "evictable": 1}


def test_states_give_way_to_newer_ones() -> None:
    cache = make(num_snapshots=2)
    prompts = [[first] * 9 for first in range(4)]
    for prompt in prompts:
        assert serve(cache, prompt) == 0
    assert [serve(cache, prompt) for prompt in (prompts[3], prompts[0])] == [8, 0]
    assert cache.num_cached_tokens == 2 * 8, "pages without a state stay"


def test_rows_that_hold_all_states_go_on_without() -> None:
    cache = make(num_snapshots=1)
    leases = [cache.admit(array([first] * 9)) for first in range(2)]
    for lease in leases:
        assert lease is not None and cache.grow(lease, 0, 9)
    assert [cache.states.row_pages(lease.row, 1, 2).tolist() for lease in leases if lease and cache.states] == [[0], [NO_PAGE]]
