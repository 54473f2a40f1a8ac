"""One request and many, both loops, page sizes, limits of length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.types import FinishReason, ForwardMode


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
def test_tokens_are_those_of_the_oracle(make_harness: Callable[..., Harness], overlap: bool, page_size: int) -> None:
    harness = make_harness(overlap=overlap, page_size=page_size, num_pages=4096 // page_size)
    for i in range(20):  # more than there are rows
        harness.submit(prompt_of(5 + 7 * i, i), max_new=3 + i, ignore_eos=i % 2 == 0, stream=i % 3 == 0)
    harness.run()
    harness.assert_as_expected()


def test_one_request_step_by_step(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=False)
    rid = harness.submit([5, 6, 7], max_new=3, ignore_eos=True, stream=True)
    harness.run()
    assert harness.modes == [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.DECODE]
    assert [step.seq_lens.tolist() for step in harness.steps] == [[3], [4], [5]]
    answer = harness.answer(rid)
    assert answer.message_sizes == [1, 1, 1]
    assert answer.finish == FinishReason.length_limit(3)
    assert answer.prompt_tail == [5, 6, 7]


def test_overlap_launches_no_step_beyond_the_length(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=True)
    harness.submit([5, 6, 7], max_new=3, ignore_eos=True)
    harness.run()
    assert len(harness.steps) == 3


def test_overlap_drops_the_token_after_eos(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=True, vocab_size=3, context_len=64)
    rid = harness.submit([1, 2], max_new=50)
    harness.run()
    harness.assert_as_expected()
    answer = harness.answer(rid)
    assert answer.finish == FinishReason.stop(0)
    assert len(harness.steps) == len(answer.token_ids) + 1  # one launched too many, its token dropped


def test_launching_does_not_wait(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=True)
    harness.submit([5, 6, 7], max_new=5, ignore_eos=True)
    for _ in range(3):
        harness.turn()
        assert harness.scheduler.num_in_flight == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_no_tokens_wanted(make_harness: Callable[..., Harness], overlap: bool) -> None:
    """max_new_tokens 0 computes (and caches) the prompt and answers without tokens."""
    harness = make_harness(overlap=overlap)
    rid = harness.submit(prompt_of(40), max_new=0)
    harness.run()
    assert harness.answer(rid).finish == FinishReason.length_limit(0)
    assert harness.answer(rid).token_ids == []
    again = harness.submit(prompt_of(40), max_new=2)
    harness.run()
    assert harness.answer(again).cached_tokens == 39


def test_output_is_clamped_to_the_context(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(context_len=32)
    for max_new in (None, 500):
        rid = harness.submit(prompt_of(20, 1), max_new=max_new, ignore_eos=True)
        harness.run()
        assert harness.answer(rid).finish == FinishReason.length_limit(12)
    harness.assert_as_expected()


@pytest.mark.parametrize("page_size", [1, 4])
def test_output_is_clamped_to_the_kv_cache(make_harness: Callable[..., Harness], page_size: int) -> None:
    harness = make_harness(page_size=page_size, num_pages=32 // page_size)
    rid = harness.submit(prompt_of(20), max_new=100, ignore_eos=True)
    harness.run()
    # 32 tokens have KV; the last one sampled needs none.
    assert harness.answer(rid).finish == FinishReason.length_limit(13)
    harness.assert_as_expected()


def test_prompt_that_fills_the_whole_kv_cache(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(page_size=4, num_pages=8)
    for seed in range(3):  # the second one has to evict the first one's prefix
        harness.submit(prompt_of(32, seed), max_new=5)
    harness.run()
    harness.assert_as_expected()


def test_the_same_prompt_again_comes_from_the_cache(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(page_size=4)
    first = harness.submit(prompt_of(30), max_new=20, ignore_eos=True)
    harness.run()
    second = harness.submit(prompt_of(30) + harness.answer(first).token_ids, max_new=4)
    harness.run()
    assert harness.answer(first).cached_tokens == 0
    assert harness.answer(second).cached_tokens == 48  # 30 + 19 tokens have KV: 12 whole pages
    harness.assert_as_expected()


def test_namespaces_do_not_share(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    for key in ("a", "b", "a"):
        harness.submit(prompt_of(50), max_new=1, extra_key=key)
        harness.run()
    assert [harness.answer(f"r{i}").cached_tokens for i in range(3)] == [0, 0, 49]


def test_without_radix_cache(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"disable_radix_cache": True, "schedule_policy": "lpm"})
    for _ in range(6):
        harness.submit(prompt_of(50), max_new=9)
    harness.run()
    harness.assert_as_expected()
    assert all(answer.cached_tokens == 0 for answer in harness.transport.answers.values())


def test_times_are_in_order(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5), max_new=4)
    harness.run()
    times = harness.answer(rid).times
    assert times is not None and times.num_retractions == 0
    assert 0 < times.queue_entry_s <= times.first_scheduled_s < times.first_token_s < times.finished_s
    assert times.grammar_ready_s == 0 and not times.retractions_s
    (chunk,) = times.chunks
    assert (chunk.start_s, chunk.end_s, chunk.num_tokens) == (times.first_scheduled_s, times.first_token_s, 5)


def test_every_chunk_of_a_prompt_has_its_time(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 8, "disable_radix_cache": True}, context_len=1024, num_pages=1024)
    few, many = harness.submit(prompt_of(20), max_new=2), harness.submit(prompt_of(8 * 70), max_new=2)
    harness.run()
    times = harness.answer(few).times
    assert times is not None and [chunk.num_tokens for chunk in times.chunks] == [8, 8, 4]
    moments = [moment for chunk in times.chunks for moment in (chunk.start_s, chunk.end_s)]
    assert moments[0] == times.first_scheduled_s and moments[-1] == times.first_token_s and min(moments) > 0
    assert all(chunk.start_s < chunk.end_s for chunk in times.chunks)
    times = harness.answer(many).times  # bounded: what comes late is added up
    assert times is not None and len(times.chunks) == 64 < times.num_chunks
    assert sum(chunk.num_tokens for chunk in times.chunks) == 8 * 70
    assert times.chunks[-1].end_s == times.first_token_s


def test_an_abort_in_the_middle_of_a_prompt_ends_its_chunks(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 8})
    rid = harness.submit(prompt_of(40), max_new=2)
    harness.turn(3)
    harness.abort(rid)
    harness.run()
    times = harness.answer(rid).times
    assert times is not None and times.first_token_s == 0
    assert times.chunks and all(0 < chunk.end_s <= times.finished_s for chunk in times.chunks)


def test_slow_device(make_harness: Callable[..., Harness]) -> None:
    """Steps that finish long after they were launched read only what they were launched with."""
    harness = make_harness(step_delay_s=0.003, page_size=4)
    for i in range(8):
        harness.submit(prompt_of(40, i), max_new=6 + i, ignore_eos=True)
    harness.run()
    harness.assert_as_expected()
