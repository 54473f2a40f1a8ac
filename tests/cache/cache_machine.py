"""What state machines over a CacheManager share: few prompts, rows that end in any order, books that are right when idle."""

from __future__ import annotations

import dataclasses

import numpy as np
from cached_prefixes import cached_prefixes
from event_index import EventIndex
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jaxserve.cache import CacheManager, Lease
from jaxserve.runner import KVGroup

MAX_ROWS = 4
MAX_LEN = 24

# Cut and continued at few places, so that prefixes meet, part and repeat often.
STEMS = ((0,) * MAX_LEN, (0, 1) * (MAX_LEN // 2), (1, 1, 0, 0) * (MAX_LEN // 4))


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(1, MAX_LEN - 8))]
    return [*stem, *draw(st.sampled_from([(), (0,), (1,), (1, 1)]))]


def array(values: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(values, np.int32)


@dataclasses.dataclass(eq=False)
class Running:
    lease: Lease
    tokens: list[int]
    computed: int  # tokens whose KV the model has written


class CacheMachine(RuleBasedStateMachine):
    policy = "lru"
    disable_radix = False
    running: list[Running]

    def make_cache(self, groups: tuple[KVGroup, ...], page_size: int, **options: int) -> None:
        self.page_size = page_size
        self.cache = CacheManager(
            groups=groups,
            page_size=page_size,
            max_rows=2 * MAX_ROWS,
            rows=range(MAX_ROWS, 2 * MAX_ROWS),  # the others are another shard's
            max_pages_per_row=-(-MAX_LEN // page_size),
            eviction_policy=self.policy,
            disable_radix=self.disable_radix,
            record_events=True,
            **options,
        )
        self.index = EventIndex(page_size)
        self.running = []

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        self.end(data.draw(st.sampled_from(self.running)), keep)

    def end(self, run: Running, keep: bool) -> None:
        self.running.remove(run)
        self.cache.release(run.lease, array(run.tokens[: run.computed]) if keep else None)

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        self.index.take_in(self.cache.take_events())
        assert self.index.prefixes == set(cached_prefixes(self.cache.tree, self.page_size))

    @invariant()
    def idle_means_clean(self) -> None:
        if not self.running:
            report = self.cache.check()
            assert report.is_clean, report.describe()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.running:
                self.end(self.running[0], keep=False)
            self.idle_means_clean()
            self.cache.repair(self.cache.check())
            self.idle_means_clean()


def check_any_order(machine: type[CacheMachine], max_examples: int, step_count: int, **changes: object) -> None:
    """Of calls, with other values of the machine's class attributes."""
    how = settings(
        max_examples=max_examples, stateful_step_count=step_count, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=True,
    )  # fmt: skip
    run_state_machine_as_test(type("Machine", (machine,), changes), settings=how)
