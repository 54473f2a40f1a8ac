"""KV groups with a window, through the scheduler: pages come back, prefixes are found, short memory is shared out."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.runner import KVGroup

WINDOW = 16


def small_window(num_pages: int, window_pages: int) -> tuple[KVGroup, ...]:
    return (KVGroup(num_pages), KVGroup(window_pages, WINDOW))


def held_pages(harness: Harness) -> int:
    return int((harness.scheduler.cache.shards[0].windows[0].holds > 0).sum())


def test_a_sequence_may_be_many_times_its_windows_pool(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, kv_groups=(KVGroup(36, WINDOW),), max_step_tokens=16)
    rid = harness.submit(prompt_of(100), 150, ignore_eos=True)
    harness.turn(60)
    assert held_pages(harness) <= WINDOW + 2
    harness.run()
    harness.assert_as_expected(rid)
    assert len(harness.answer(rid).token_ids) == 150
    assert harness.scheduler.internal_state()["num_retractions"] == 0


def test_a_short_pool_of_a_window_is_shared_by_long_sequences(make_harness: Callable[..., Harness]) -> None:
    """Eight sequences of 100 tokens beside a window's pool of 200: as one pool it would hold two of them."""
    harness = make_harness({"chunked_prefill_size": 16}, kv_groups=small_window(1000, 200), max_step_tokens=16)
    rids = [harness.submit(prompt_of(40, i), 60, ignore_eos=True) for i in range(8)]
    harness.turn(40)
    assert harness.scheduler.load().num_running == 8
    harness.run()
    harness.assert_as_expected(*rids)
    assert harness.scheduler.internal_state()["num_retractions"] == 0


def test_a_prefix_is_found_after_its_window_moved_on(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(kv_groups=small_window(400, 400), max_step_tokens=128)
    first = harness.submit(prompt_of(60), 40, ignore_eos=True)
    harness.run()
    whole = harness.submit(prompt_of(60), 5, ignore_eos=True)
    branch = harness.submit([*prompt_of(60)[:30], 99], 5, ignore_eos=True)
    chat = harness.submit([*prompt_of(60), *harness.answer(first).token_ids[:-1], 7], 5, ignore_eos=True)
    harness.run()
    harness.assert_as_expected(first, whole, branch, chat)
    assert [harness.answer(rid).cached_tokens for rid in (whole, branch, chat)] == [59, 30, 99]


def test_a_prefix_whose_window_is_gone_is_computed_again(make_harness: Callable[..., Harness]) -> None:
    """Its pages went to other prompts, while those of the other layers stayed."""
    harness = make_harness(kv_groups=small_window(1000, 150), max_step_tokens=64)
    first = harness.submit(prompt_of(60), 1, ignore_eos=True)
    harness.run()
    others = [harness.submit(prompt_of(60, i), 1, ignore_eos=True) for i in range(1, 6)]
    harness.run()
    again = harness.submit(prompt_of(60), 20, ignore_eos=True)
    harness.run()
    harness.assert_as_expected(first, *others, again)
    assert harness.answer(again).cached_tokens < 59
    # What was computed again fills the gaps.
    last = harness.submit(prompt_of(60), 20, ignore_eos=True)
    harness.run()
    assert harness.answer(last).cached_tokens == 59
    harness.assert_as_expected(last)


def test_more_than_the_windows_pool_is_retracted_and_comes_back(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(
        {"schedule_conservativeness": 0.0, "chunked_prefill_size": 16}, kv_groups=small_window(1000, 60), max_step_tokens=16
    )
    rids = [harness.submit(prompt_of(3, i), 60, ignore_eos=False, stop_token_ids=[101 + i]) for i in range(8)]
    harness.run()
    harness.assert_as_expected(*rids)
    assert harness.scheduler.internal_state()["num_retractions"] > 0
    assert harness.scheduler.cache.check().is_clean


def test_what_few_will_miss_goes_first(make_harness: Callable[..., Harness]) -> None:
    """Six prompts of 60 tokens beside a window's pool of 200: what stays is what each needs to be gone on from."""
    harness = make_harness(kv_groups=small_window(1000, 200), max_step_tokens=64)
    for _ in range(2):
        rids = []
        for i in range(6):
            rids.append(harness.submit(prompt_of(60, i), 1, ignore_eos=True))
            harness.run()
    harness.assert_as_expected(*rids)
    assert [harness.answer(rid).cached_tokens for rid in rids] == [59] * 6


def test_how_full_each_pool_is(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    """As in SGLang, what stands for all is that of the fullest."""
    caplog.set_level(logging.INFO)
    harness = make_harness({"decode_log_interval": 1}, kv_groups=small_window(1000, 80), max_step_tokens=64)
    rid = harness.submit(prompt_of(50), 30, ignore_eos=True)
    harness.turn(10)
    state = harness.scheduler.internal_state()
    full, window = state["kv_groups"]
    assert (full["window"], full["total_tokens"], full["evictable_tokens"]) == (None, 1000, 0)
    assert (window["window"], window["total_tokens"]) == (WINDOW, 80)
    held = held_pages(harness)
    assert full["used_tokens"] > 50 > WINDOW + 2 >= window["used_tokens"] == held >= WINDOW
    assert (full["token_usage"], window["token_usage"]) == (full["used_tokens"] / 1000, held / 80)
    assert (state["num_used_tokens"], state["token_usage"]) == (full["used_tokens"], window["token_usage"])
    line = caplog.records[-1].getMessage()
    assert line.startswith("Decode batch")
    assert f"#full token: {full['used_tokens']}, full token usage: 0.06, #swa token: {held}, swa token usage: 0.2" in line
    assert "full token usage: 0.05, swa token usage: 0.62, " in caplog.records[0].getMessage()
    harness.run()
    harness.assert_as_expected(rid)
    state = harness.scheduler.internal_state()
    full, window = state["kv_groups"]
    assert (full["used_tokens"], window["used_tokens"], state["token_usage"]) == (0, 0, 0.0)
    assert full["evictable_tokens"] == state["num_cached_tokens"] == 79 > window["evictable_tokens"] > WINDOW


def test_a_window_alone_is_no_other_pool(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    harness = make_harness(kv_groups=(KVGroup(100, WINDOW),), max_step_tokens=64)
    harness.submit(prompt_of(50), 30, ignore_eos=True)
    harness.turn(10)
    state = harness.scheduler.internal_state()
    (group,) = state["kv_groups"]
    assert (state["num_used_tokens"], state["token_usage"]) == (group["used_tokens"], group["used_tokens"] / 100)
    assert ", token usage: 0.50, " in caplog.records[0].getMessage()
