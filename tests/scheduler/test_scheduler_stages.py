"""Pipelines: as many steps under way as there are stages, of rows that do not wait for each other; and the same tokens.

The fake runner checks how many steps are in flight and that results are fetched in order.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_scheduler_random
from fake_contents import weights_of
from fake_runner import FakeRunner, fake_spec
from scheduler_harness import Harness, prompt_of

from jaxserve.runner import StepInput
from jaxserve.scheduler import prefill_adder
from jaxserve.scheduler.batch import NO_ROWS, ScheduleBatch
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.update_weights_from_disk import UpdateWeightFromDiskReqInput
from jaxserve.scheduler.micro_batches import MicroBatches
from jaxserve.scheduler.rows import RowTable
from jaxserve.types import ForwardMode

NO_EOS = (1000,)
MakeHarness = Callable[..., Harness]
both_loops = pytest.mark.parametrize("overlap", [True, False])
stages = pytest.mark.parametrize("num_stages", [2, 4])


def harness_of(make_harness: MakeHarness, num_stages: int, args: dict[str, Any] | None = None, **changes: Any) -> Harness:
    return make_harness(
        args, **{"num_stages": num_stages, "eos_token_ids": NO_EOS, "num_pages": 4096, "max_rows": 32, **changes}
    )


def shares_rows(one: StepInput, other: StepInput) -> bool:
    return bool(np.isin(one.rows, other.rows).any())


def decode_sizes(steps: list[StepInput]) -> list[int]:
    return [step.num_decode_rows for step in steps]


# --- micro-batches


class Ring:
    """MicroBatches alone: every step is launched at once, and its result is in when P others were launched."""

    def __init__(self, num_stages: int, num_rows: int, **options: Any) -> None:
        self.table = RowTable(max_rows=64, context_len=8, default_stream_interval=1)
        self.micro_batches = MicroBatches(self.table, num_stages=num_stages, **options)
        self.rows = np.arange(num_rows, dtype=np.int32)
        self.under_way: list[np.ndarray] = []
        self.num_stages = num_stages

    def step(self, *, prefills: bool = False) -> list[int]:
        micro_batch = self.micro_batches.pick(self.rows)
        rows = NO_ROWS if prefills else micro_batch.rows
        assert not micro_batch.is_due or not any(np.isin(micro_batch.rows, other).any() for other in self.in_stages)
        self.micro_batches.launched(ScheduleBatch(decode_rows=rows))
        self.table.in_flight[rows] += 1
        self.under_way.append(rows)
        if len(self.under_way) > self.num_stages:
            self.table.in_flight[self.under_way.pop(0)] -= 1
        return rows.tolist()

    @property
    def in_stages(self) -> list[np.ndarray]:
        return self.under_way[-(self.num_stages - 1) :]


@stages
@pytest.mark.parametrize("num_rows", [4, 5, 7, 8, 30, 63])
def test_the_steps_of_a_ring_divide_the_rows_evenly(num_stages: int, num_rows: int) -> None:
    ring = Ring(num_stages, num_rows)
    ring.step(prefills=True)
    steps = [ring.step() for _ in range(5 * num_stages)][2 * num_stages :]
    for first in range(0, len(steps), num_stages):
        cycle = steps[first : first + num_stages]
        assert sorted(itertools.chain(*cycle)) == ring.rows.tolist(), "each row once"
        assert max(map(len, cycle)) - min(map(len, cycle)) <= 1
    assert steps[:num_stages] == steps[num_stages : 2 * num_stages], "nobody changes without a reason"


@stages
def test_what_is_left_after_ends_is_divided_anew(num_stages: int) -> None:
    ring = Ring(num_stages, 32)
    first = [ring.step() for _ in range(4 * num_stages)][-num_stages:]
    ring.rows = np.array(sorted({*range(32)} - {*first[0]}), np.int32)  # all of one micro-batch end
    steps = [ring.step() for _ in range(5 * num_stages)][-num_stages:]
    sizes = list(map(len, steps))
    assert sorted(itertools.chain(*steps)) == ring.rows.tolist() and max(sizes) - min(sizes) <= 1


def test_fewer_rows_than_stages_leave_places_free() -> None:
    ring = Ring(4, 2)
    assert [ring.step() for _ in range(4)] == [[0], [1], [0], [1]]  # the second two wait for the first
    assert ring.step() == [], "nobody is two steps ahead of what is known"


def test_prefill_steps_have_a_place_in_the_ring() -> None:
    """Every second step decodes, so two of them divide the rows, and none of the rows misses a turn."""
    ring = Ring(4, 32)
    steps = [ring.step(prefills=bool(number % 2)) for number in range(40)][-8:]
    assert list(map(len, steps)) == [16, 0] * 4
    assert sorted(steps[0] + steps[2]) == ring.rows.tolist() and steps[0] == steps[4]


def test_shards_are_divided_by_themselves_and_micro_batches_may_be_bounded() -> None:
    ring = Ring(4, 64, num_shards=2)
    ring.rows = np.array([*range(12), *range(32, 60)], np.int32)
    for rows in [ring.step() for _ in range(20)][-4:]:
        assert (sum(row < 32 for row in rows), sum(row >= 32 for row in rows)) == (3, 7)
    ring = Ring(4, 40, most_rows=6)
    steps = [ring.step() for _ in range(20)]
    assert {len(rows) for rows in steps} == {6}
    turns = [number for number, rows in enumerate(steps) if 39 in rows]
    assert max(np.diff(turns)) == 7, "longest waiting first: all 40 have had their turn"


# --- steps


@both_loops
@stages
def test_steps_under_way_have_rows_of_their_own(make_harness: MakeHarness, num_stages: int, overlap: bool) -> None:
    harness = harness_of(make_harness, num_stages, overlap=overlap)
    for i in range(13):
        harness.submit(prompt_of(5, i), max_new=40)
    harness.run()
    harness.assert_as_expected()
    steps = harness.steps[2 * num_stages : -2 * num_stages]  # all are there
    assert all(step.mode is ForwardMode.DECODE for step in steps) and len(steps) > 20
    for number in range(len(steps) - num_stages + 1):
        ring = steps[number : number + num_stages]
        assert not any(shares_rows(one, other) for one, other in itertools.combinations(ring, 2))
        sizes = decode_sizes(ring)
        assert sum(sizes) == 13 and max(sizes) - min(sizes) <= 1


@stages
def test_ends_and_aborts_leave_even_micro_batches(make_harness: MakeHarness, num_stages: int) -> None:
    harness = harness_of(make_harness, num_stages)
    rids = [harness.submit(prompt_of(5, i), max_new=10 if i % 3 == 0 else 100) for i in range(24)]
    harness.turn(4 * num_stages)
    for rid in rids[1:12:3]:
        harness.abort(rid, exact=True)
    harness.turn(20 * num_stages)
    sizes = decode_sizes(harness.steps[-num_stages:])
    assert sum(sizes) == 12 and max(sizes) - min(sizes) <= 1
    harness.run()
    harness.assert_as_expected(*(rid for rid in rids if rid not in rids[1:12:3]))


@both_loops
@stages
def test_one_request_alone_has_a_step_ready_where_the_one_before_ends(
    make_harness: MakeHarness, num_stages: int, overlap: bool
) -> None:
    harness = harness_of(make_harness, num_stages, overlap=overlap)
    harness.submit(prompt_of(5), max_new=20)
    least = most = 1
    for turn in range(20):
        harness.turn()
        if turn >= 2:
            in_flight = harness.scheduler.num_in_flight
            least, most = min(least, in_flight), max(most, in_flight)
    assert (least, most) == (1, 2 if overlap or num_stages > 2 else 1), "one under way, and one that waits for it"
    harness.run()
    harness.assert_as_expected()


@stages
def test_the_chunks_of_a_prompt_follow_each_other_without_results(make_harness: MakeHarness, num_stages: int) -> None:
    harness = harness_of(make_harness, num_stages, {"chunked_prefill_size": 16})
    harness.submit(prompt_of(150), max_new=3)
    for count in range(1, num_stages + 1):
        harness.turn()
        assert (len(harness.steps), harness.scheduler.num_in_flight) == (count, count), "a launch a round, no result"
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[16]] * 9 + [[6]]


@stages
def test_chunks_fill_the_places_that_a_lonely_request_leaves(make_harness: MakeHarness, num_stages: int) -> None:
    harness = harness_of(make_harness, num_stages, {"chunked_prefill_size": 16})
    harness.submit(prompt_of(5), max_new=60)
    harness.turn(6)
    first = len(harness.steps)
    harness.submit(prompt_of(200), max_new=1)
    harness.run()
    harness.assert_as_expected()
    modes = "".join(step.mode.name[0] for step in harness.steps[first:])
    assert ("E" * (num_stages - 1) + "D") * 3 in modes, modes
    assert "E" * num_stages not in modes.lstrip("E").rstrip("E"), "nobody waits for longer than a step took without stages"


@stages
def test_mixed_steps_carry_one_micro_batch(make_harness: MakeHarness, num_stages: int) -> None:
    harness = harness_of(make_harness, num_stages, {"chunked_prefill_size": 32, "enable_mixed_chunk": True})
    for i in range(8):
        harness.submit(prompt_of(5, i), max_new=60)
    harness.turn(4 * num_stages)
    first = len(harness.steps)
    harness.submit(prompt_of(200), max_new=1)
    harness.run()
    harness.assert_as_expected()
    mixed = [step for step in harness.steps[first:] if step.mode is ForwardMode.MIXED]
    assert len(mixed) >= 6 and {step.num_decode_rows for step in mixed} == {8 // num_stages}
    for ring in itertools.pairwise(mixed):
        assert not np.isin(ring[0].rows[: ring[0].num_decode_rows], ring[1].rows[: ring[1].num_decode_rows]).any()


@both_loops
@stages
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_and_stages(make_harness: MakeHarness, num_stages: int, num_shards: int, overlap: bool) -> None:
    harness = harness_of(make_harness, num_stages, num_shards=num_shards, overlap=overlap, page_size=4)
    for i in range(16):
        harness.submit(prompt_of(9 + i, i), max_new=40)
    harness.run()
    harness.assert_as_expected()
    rows_per_shard = harness.runner.spec.rows_per_shard
    middle = harness.steps[len(harness.steps) // 2]
    counts = np.bincount(middle.rows // rows_per_shard, minlength=num_shards)
    assert middle.num_decode_rows == 16 // num_stages and set(counts) == {16 // num_stages // num_shards}


# --- memory


@both_loops
@stages
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_retracted_requests_get_the_same_tokens(
    make_harness: MakeHarness, num_stages: int, overlap: bool, num_draft_tokens: int
) -> None:
    harness = harness_of(
        make_harness, num_stages, {"schedule_conservativeness": 0.0}, overlap=overlap, page_size=4, num_pages=36,
        num_draft_tokens=num_draft_tokens,
    )  # fmt: skip
    for i in range(10):
        harness.submit(prompt_of(10, i), max_new=60)
        harness.turn(4)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_retractions"] > 0


@stages
def test_a_more_urgent_request_preempts(make_harness: MakeHarness, num_stages: int) -> None:
    args = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 2}
    harness = harness_of(make_harness, num_stages, args, num_pages=70)
    for i in range(2):
        harness.submit(prompt_of(10, i), max_new=24, ignore_eos=True, priority=0)
    harness.turn(2 * num_stages)
    urgent = harness.submit(prompt_of(12, 9), max_new=20, ignore_eos=True, priority=9)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_preemptions"] > 0
    finished = {rid: answer.times.finished_s for rid, answer in harness.transport.answers.items() if answer.times}
    assert finished[urgent] < max(finished.values())


# --- what stands between steps


@stages
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_leaves_nothing_in_flight(make_harness: MakeHarness, num_stages: int, mode: Any) -> None:
    harness = harness_of(make_harness, num_stages)
    rids = [harness.submit(prompt_of(5, i), max_new=30) for i in range(9)]
    harness.turn(3 * num_stages)
    assert harness.scheduler.num_in_flight == num_stages
    harness.control(PauseGenerationReqInput(mode=mode))
    harness.turn()
    assert harness.scheduler.num_in_flight == 0
    num_steps = len(harness.steps)
    harness.turn(5)
    assert len(harness.steps) == num_steps
    harness.control(ContinueGenerationReqInput())
    harness.run()
    if mode != "abort":
        harness.assert_as_expected(*rids)


@stages
def test_weights_and_cache_between_steps(make_harness: MakeHarness, num_stages: int) -> None:
    harness = harness_of(make_harness, num_stages)
    early = [harness.submit(prompt_of(5, i), max_new=10) for i in range(9)]
    harness.turn(2 * num_stages)
    harness.control(UpdateWeightFromDiskReqInput(model_path="new"))
    give_up_s = time.monotonic() + 60
    while not harness.control_replies():
        harness.turn()
        assert time.monotonic() < give_up_s
    late = harness.submit(prompt_of(5, 1), max_new=10)
    harness.run()
    harness.assert_as_expected(*early)
    message = harness.sent[late]
    assert harness.answer(late).token_ids == harness.runner.expected_tokens(
        message.input_ids.tolist(), 10, stop_ids=(), weights=weights_of("new")
    )
    ends = harness.submit(prompt_of(5, 2), max_new=10)
    while ends not in harness.transport.answers or harness.answer(ends).finish is None:
        harness.turn()
    harness.control(FlushCacheReqInput())
    harness.turn()
    assert harness.control_replies()[-1].success, "no request is left, whatever is in flight"


@stages
@pytest.mark.parametrize("turns", range(1, 9))
def test_an_abort_at_any_time(make_harness: MakeHarness, num_stages: int, turns: int) -> None:
    """Also of a prompt of which several chunks are in flight."""
    harness = harness_of(make_harness, num_stages, {"chunked_prefill_size": 16})
    harness.submit(prompt_of(100), max_new=9, rid="long")
    harness.submit(prompt_of(7), max_new=30, rid="short")
    harness.turn(turns)
    harness.abort("long", exact=True)
    harness.run()
    harness.assert_as_expected("short")
    finish = harness.answer("long").finish
    assert finish is not None and finish.type == "abort"


# --- the contract that the fake runner checks


def test_too_many_steps_in_flight_or_results_out_of_order_are_noticed() -> None:
    runner = FakeRunner(fake_spec(num_stages=2))
    harness = Harness(num_stages=2)
    harness.submit(prompt_of(4), max_new=1)
    harness.turn()
    (step,) = harness.steps
    handles = []
    for _ in range(3):
        handles.append(runner.forward(step))
        runner.sample(handles[-1])
    with pytest.raises(AssertionError, match="4 steps are in flight, of 2 stages"):
        runner.forward(step)
    with pytest.raises(AssertionError, match="out of order"):
        runner.fetch(handles[1])
    runner.close()
    harness.run()
    harness.close()


# --- all at once


@stages
@pytest.mark.parametrize("seed", range(12))
def test_random_workloads(monkeypatch: pytest.MonkeyPatch, num_stages: int, seed: int) -> None:
    """Those of test_scheduler_random, in a pipeline."""
    monkeypatch.setattr(test_scheduler_random, "Harness", functools.partial(Harness, num_stages=num_stages))
    num_shards = (1, 1, 2)[seed % 3]
    test_scheduler_random.run_workload(1000 + seed, bool(seed % 2), delays_input=seed % 4 == 3, num_shards=num_shards)


@stages
def test_random_workloads_reach_the_hard_cases(monkeypatch: pytest.MonkeyPatch, num_stages: int) -> None:
    monkeypatch.setattr(test_scheduler_random, "Harness", functools.partial(Harness, num_stages=num_stages))
    totals = {"num_retractions": 0, "num_preemptions": 0, "cached_tokens": 0}
    for seed in range(8):
        state = test_scheduler_random.run_workload(seed, overlap=True).scheduler.internal_state()
        totals = {key: total + state[key] for key, total in totals.items()}
    assert all(totals.values()), totals
    assert prefill_adder.CLIP_MAX_NEW_TOKENS > 2, "the patch is gone"
