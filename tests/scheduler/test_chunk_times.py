"""Dynamic chunking: chunks get shorter as a prompt goes on, so that none takes longer than the first; and the same tokens."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import test_scheduler_random
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, prompt_of

from jaxserve.runner import StepInput
from jaxserve.scheduler.chunk_times import ChunkTimes
from jaxserve.types import ForwardMode

NO_EOS = (1000,)
MakeHarness = Callable[..., Harness]


def step_time(times: ChunkTimes, start: int, length: int, beside: int = 0) -> float:
    """Of `length` tokens behind `start` others: a program's tokens, and pairs."""
    rooms = [bucket - beside for bucket in times.token_buckets]
    tokens = min((room for room in rooms if room >= length), default=length)
    return tokens + times.work_ratio * (start * length + length * length / 2)


# --- how long


@pytest.mark.parametrize(
    ("start", "budget", "longest"),
    [
        (0, 4, 4),
        (4, 4, 2),  # 2 + (4 * 2 + 2 * 2 / 2) = 12 = 4 + 4 * 4 / 2
        (3, 4, 2),
        (10, 4, 1),  # 1 + (10 + 1 / 2) is still less than 12
        (11, 4, 1),  # takes longer, but is the least
        (99, 0, 0),
    ],
)
def test_as_long_as_the_first(start: int, budget: int, longest: int) -> None:
    assert ChunkTimes(1.0, page_size=1).longest(start, budget, beside=0) == longest


@pytest.mark.parametrize(("start", "budget", "longest"), [(4, 7, 4), (8, 8, 4), (96, 4, 4), (4, 3, 3), (4, 0, 0), (4, -2, -2)])
def test_whole_pages_and_at_least_one_if_the_budget_has_it(start: int, budget: int, longest: int) -> None:
    assert ChunkTimes(1.0, page_size=4).longest(start, budget, beside=0) == longest


@pytest.mark.parametrize(
    ("start", "budget", "beside", "longest"),
    [
        (12, 16, 0, 8),  # 16 + (12 * 8 + 8 * 8 / 2) = 16 + 16 * 16 / 2
        (30, 16, 0, 4),  # in either bucket
        (31, 16, 0, 4),  # in the small one, which leaves more time for pairs; in the large one 3
        (9, 12, 4, 6),  # 12 + (9 * 6 + 6 * 6 / 2) = 12 + 12 * 12 / 2, of what 4 tokens leave in the large bucket
        (1, 6, 0, 5),  # the first chunk has to pay for the large bucket, too: 16 + (5 + 5 * 5 / 2) < 16 + 6 * 6 / 2
        (500, 16, 0, 1),
    ],
)
def test_steps_take_as_long_as_their_bucket(start: int, budget: int, beside: int, longest: int) -> None:
    assert ChunkTimes(1.0, page_size=1, token_buckets=(4, 16)).longest(start, budget, beside) == longest


def test_what_a_chunk_takes_of_a_budget() -> None:
    times = ChunkTimes(1.0, page_size=1)
    assert times.at_beginning(4, 2) == 4
    assert times.at_beginning(5, 2) == 5, "4 and a bit, rounded up"
    assert [times.at_beginning(0, length) for length in range(100)] == list(range(100))


ratios = st.floats(-6, 0).map(lambda exponent: 10.0**exponent)
page_sizes = st.sampled_from([1, 16, 64])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    ratio=ratios, page_size=page_sizes, pages=st.integers(1, 2000), budget=st.integers(1, 5000), beside=st.integers(0, 300),
    buckets=st.lists(st.integers(1, 4999), max_size=4, unique=True).map(sorted), has_buckets=st.booleans(),
)  # fmt: skip
def test_no_chunk_takes_longer_than_the_first(
    ratio: float, page_size: int, pages: int, budget: int, beside: int, buckets: list[int], has_buckets: bool
) -> None:
    start, budget = pages * page_size, max(budget, page_size)
    times = ChunkTimes(ratio, page_size, (*buckets, budget + beside + 7) if has_buckets else ())
    chosen = times.longest(start, budget, beside)
    assert page_size <= chosen <= budget and chosen % page_size == 0
    most = step_time(times, 0, budget, beside) * (1 + 1e-9)
    assert chosen == page_size or step_time(times, start, chosen, beside) <= most
    longer = chosen + page_size
    assert longer > budget or step_time(times, start, longer, beside) * (1 + 1e-9) > most, "another page would have fitted"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ratio=ratios, page_size=page_sizes, pages=st.integers(1, 2000), budget=st.integers(64, 5000))
def test_a_chunk_takes_the_budget_that_it_was_made_for(ratio: float, page_size: int, pages: int, budget: int) -> None:
    start, times = pages * page_size, ChunkTimes(ratio, page_size)
    chosen = times.longest(start, budget, beside=0)
    taken = times.at_beginning(start, chosen)
    assert taken >= chosen and (taken <= budget + 1 or chosen == page_size)
    assert step_time(times, 0, taken - 1) <= step_time(times, start, chosen) * (1 + 1e-9)
    assert step_time(times, start, chosen) <= step_time(times, 0, taken) * (1 + 1e-9)


# --- in steps

CHUNK, PAGE, RATIO = 32, 4, 0.05
DYNAMIC = {"chunked_prefill_size": CHUNK, "enable_dynamic_chunking": True}


def harness_of(make_harness: MakeHarness, args: dict[str, Any] | None = None, **changes: Any) -> Harness:
    spec = {"attention_work_ratio": RATIO, "page_size": PAGE, "num_pages": 512, "eos_token_ids": NO_EOS, **changes}
    return make_harness(DYNAMIC | (args or {}), **spec)


def prefills(harness: Harness) -> list[StepInput]:
    return [step for step in harness.steps if step.mode is not ForwardMode.DECODE]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_stages", [1, 4])
def test_chunks_get_shorter_and_tokens_stay(make_harness: MakeHarness, num_stages: int, overlap: bool) -> None:
    harness = harness_of(make_harness, num_stages=num_stages, overlap=overlap)
    harness.submit(prompt_of(203), max_new=9)
    harness.run()
    harness.assert_as_expected()
    # 28 behind 32 others: 28 + 0.05 * (32 * 28 + 28 * 28 / 2) = 92 would take longer than 32 + 0.05 * 32 * 32 / 2 = 57.6.
    assert harness.prefill_lens()[:3] == [[32], [16], [12]]
    lens = [length for (length,) in harness.prefill_lens()]
    times = ChunkTimes(RATIO, PAGE)
    assert sum(lens) == 203 and lens[:-1] == sorted(lens[:-1], reverse=True) and lens[-2] == PAGE
    for number, length in enumerate(lens):
        assert length <= PAGE or step_time(times, sum(lens[:number]), length) <= step_time(times, 0, CHUNK)


@pytest.mark.parametrize(("args", "ratio"), [({"enable_dynamic_chunking": False}, RATIO), ({}, 0.0)])
def test_chunks_stay_as_long_without_it_or_where_nothing_grows(
    make_harness: MakeHarness, args: dict[str, Any], ratio: float
) -> None:
    harness = harness_of(make_harness, args, attention_work_ratio=ratio)
    harness.submit(prompt_of(203), max_new=9)
    harness.run()
    assert harness.prefill_lens() == [[32]] * 6 + [[11]]


def test_token_buckets_count(make_harness: MakeHarness) -> None:
    """One bucket: the matrices of a step take the same time, however short the chunk is."""
    harness = harness_of(make_harness, {"prefill_token_buckets": (CHUNK,)})
    harness.submit(prompt_of(100), max_new=1)
    harness.run()
    harness.assert_as_expected()
    # 12 * 32 + 12 * 12 / 2 = 456 < 32 * 32 / 2 = 512 < 16 * 32 + 16 * 16 / 2
    assert harness.prefill_lens()[:2] == [[32], [12]]


def test_short_prompts_are_not_touched(make_harness: MakeHarness) -> None:
    """Those that fit into a step, also where a part is cached and some of them share it."""
    steps = []
    for is_on in (True, False):
        harness = harness_of(make_harness, {"enable_dynamic_chunking": is_on})
        for i in range(12):
            harness.submit(prompt_of(3 + i, i), max_new=6)
            harness.submit(prompt_of(14, i // 4), max_new=3)
            harness.turn(4)
        harness.run()
        harness.assert_as_expected()
        assert harness.scheduler.internal_state()["cached_tokens"] > 0
        steps.append([(step.mode, step.rows.tolist(), step.extend_lens.tolist()) for step in harness.steps])
    assert steps[0] == steps[1]
    assert any(len(rows) > 1 for mode, rows, _ in steps[0] if mode is ForwardMode.EXTEND)


def test_a_step_s_budget_holds_with_others_beside_a_chunk(make_harness: MakeHarness) -> None:
    harness = harness_of(make_harness, num_pages=2048)
    for i in range(3):
        harness.submit(prompt_of(150 + 7 * i, i), max_new=3)
        for j in range(4):
            harness.submit(prompt_of(5, 10 * i + j), max_new=2)
    harness.run()
    harness.assert_as_expected()
    times = ChunkTimes(RATIO, PAGE)
    for step in prefills(harness):
        starts = (step.seq_lens - step.extend_lens).tolist()
        taken = sum(times.at_beginning(start, length) for start, length in zip(starts, step.extend_lens.tolist(), strict=True))
        lone_page = max(step.extend_lens) <= PAGE and step.num_rows == 1
        assert sum(step.extend_lens) <= CHUNK and (taken <= CHUNK or lone_page), (starts, step.extend_lens)
    assert any(step.num_rows > 1 and max(step.seq_lens - step.extend_lens) for step in prefills(harness)), "someone beside"


def test_mixed_steps(make_harness: MakeHarness) -> None:
    harness = harness_of(make_harness, {"enable_mixed_chunk": True})
    for i in range(6):
        harness.submit(prompt_of(5, i), max_new=60)
    harness.turn(6)
    harness.submit(prompt_of(180), max_new=3)
    harness.run()
    harness.assert_as_expected()
    chunks = [int(step.extend_lens[-1]) for step in harness.steps if step.mode is ForwardMode.MIXED]
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True) and chunks[0] == 24 and min(chunks[:-1]) == PAGE


# --- shards


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("ratio", [0.05, 0.5])
def test_a_late_chunk_of_one_shard_leaves_the_others_their_share(
    make_harness: MakeHarness, num_shards: int, ratio: float
) -> None:
    """Also where a page, the least that a chunk can be, takes longer than a share."""
    args = {"chunked_prefill_size": 16 * num_shards}
    harness = harness_of(make_harness, args, num_shards=num_shards, page_size=16, num_pages=64, attention_work_ratio=ratio)
    for i in range(num_shards):
        harness.submit(prompt_of(161, i), max_new=2)
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[16] * num_shards] * 10 + [[1] * num_shards]


@pytest.mark.parametrize("num_shards", [2, 4])
def test_each_shard_s_chunks_get_shorter(make_harness: MakeHarness, num_shards: int) -> None:
    args = {"chunked_prefill_size": CHUNK * num_shards}
    harness = harness_of(make_harness, args, num_shards=num_shards, page_size=1)
    for i in range(num_shards):
        harness.submit(prompt_of(200, i), max_new=2)
    harness.run()
    harness.assert_as_expected()
    lens = harness.prefill_lens()
    assert lens[0] == [CHUNK] * num_shards and all(sum(step) <= CHUNK * num_shards for step in lens)
    firsts = [step[0] for step in lens[:-1]]
    assert firsts == sorted(firsts, reverse=True) and firsts[-1] < CHUNK // 4
    assert all(len(set(step)) == 1 for step in lens), "all go on, and as fast"


# --- all at once


@pytest.mark.parametrize(("seed", "num_stages"), [(0, 1), (0, 3), (5, 1), (6, 3), (7, 2)])
def test_random_workloads(monkeypatch: pytest.MonkeyPatch, seed: int, num_stages: int) -> None:
    """Those of test_scheduler_random, with micro-batches of few rows where there are stages."""
    rng = random.Random(seed)
    more_args = {
        "pp_max_micro_batch_size": rng.choice([None, 1, 3]),
        "prefill_token_buckets": rng.choice([None, (16, 64, 160), (160,)]),
    }
    harness = functools.partial(_dynamic, more_args, num_stages, rng.choice([0.001, 0.05, 1.0]))
    monkeypatch.setattr(test_scheduler_random, "Harness", harness)
    test_scheduler_random.run_workload(2000 + seed, bool(seed % 2), num_shards=(1, 1, 2, 4)[seed % 4])


def _dynamic(more_args: dict[str, Any], num_stages: int, ratio: float, args: dict[str, Any], **spec: Any) -> Harness:
    args = {**args, **more_args, "enable_dynamic_chunking": args["chunked_prefill_size"] != -1}
    return Harness(args, num_stages=num_stages, attention_work_ratio=ratio, **spec)
