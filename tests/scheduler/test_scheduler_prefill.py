"""Prefill steps: budgets, chunks, mixed steps, sharing a prefix inside a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_runner import fake_spec
from scheduler_harness import Harness, prompt_of

from jaxserve.config import ServerArgs
from jaxserve.scheduler.prefill import prefill_limits
from jaxserve.types import ForwardMode

# --- limits


@pytest.mark.parametrize(
    ("args", "step_tokens"),
    [
        ({}, 128),  # the runner's largest step
        ({"chunked_prefill_size": 64}, 64),
        ({"chunked_prefill_size": 64, "max_prefill_tokens": 48}, 48),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 100}, 100),
    ],
)
def test_tokens_of_a_step(args: dict[str, Any], step_tokens: int) -> None:
    limits = prefill_limits(ServerArgs(**args), fake_spec())
    assert limits.step_tokens == step_tokens
    assert limits.splits_prompts == (args.get("chunked_prefill_size") != -1)


def test_a_step_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill one page of 64 tokens"):
        prefill_limits(ServerArgs(chunked_prefill_size=32), fake_spec(page_size=64))


# --- which prompts share a step


def test_a_step_takes_as_many_prompts_as_fit(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 64})
    for i in range(5):
        harness.submit(prompt_of(30, i), max_new=1)
    harness.run()
    harness.assert_as_expected()
    # The third is split to fill the step, and goes on first.
    assert harness.prefill_lens() == [[30, 30, 4], [26, 30, 8], [22]]


def test_prefill_max_requests(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"prefill_max_requests": 2})
    for i in range(5):
        harness.submit(prompt_of(5, i), max_new=1)
    harness.run()
    assert harness.prefill_lens() == [[5, 5], [5, 5], [5]]


def test_max_running_requests(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"max_running_requests": 3})
    for i in range(7):
        harness.submit(prompt_of(5, i), max_new=5)
    harness.run()
    harness.assert_as_expected()
    assert max(step.num_rows for step in harness.steps) == 3


def test_rows_are_used_again(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=1)
    for i in range(4):
        harness.submit(prompt_of(5, i), max_new=5)
    harness.run()
    harness.assert_as_expected()


def test_what_requests_may_still_produce_is_held_free(make_harness: Callable[..., Harness]) -> None:
    """Two requests of 10 + 40 fit a pool of 100 by their prompts, but not by what they may become."""
    harness = make_harness({"schedule_conservativeness": 2.0}, num_pages=100)
    for i in range(2):
        harness.submit(prompt_of(10, i), max_new=80, ignore_eos=True)
    harness.run()
    harness.assert_as_expected()
    assert max(step.num_rows for step in harness.steps) == 1


def test_a_request_that_could_only_wait_for_itself_is_admitted(make_harness: Callable[..., Harness]) -> None:
    """Prompt and output fill the pool to the last token, which no estimate would let pass."""
    harness = make_harness(num_pages=64)
    harness.submit(prompt_of(32), max_new=33, ignore_eos=True)
    harness.run()
    harness.assert_as_expected()


# --- chunks


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_chunks_end_at_page_boundaries(make_harness: Callable[..., Harness], page_size: int) -> None:
    harness = make_harness({"chunked_prefill_size": 50}, page_size=page_size, num_pages=1024 // page_size)
    harness.submit(prompt_of(7), max_new=3)
    harness.submit(prompt_of(200), max_new=3)
    harness.submit(prompt_of(90, 1), max_new=3)
    harness.run()
    harness.assert_as_expected()
    for step in harness.steps:
        ends = step.seq_lens[step.num_decode_rows :][~step.sample[step.num_decode_rows :]]
        assert (ends % page_size == 0).all() and len(ends) <= 1


def test_one_prompt_at_a_time_is_split(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 40})
    for i in range(3):
        harness.submit(prompt_of(100, i), max_new=1)
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[40], [40], [20, 20], [40], [40], [40], [40], [20]]
    chunked = [int((~step.sample).sum()) for step in harness.steps]
    assert max(chunked) == 1


def test_prompts_are_never_split_if_told_so(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": -1, "max_prefill_tokens": 50})
    lengths = [20, 20, 20, 100, 10]
    for i, length in enumerate(lengths):
        harness.submit(prompt_of(length, i), max_new=1)
    harness.run()
    harness.assert_as_expected()
    # The prompt of 100 exceeds the budget of 50 but is alone in its step, and fits the runner's.
    assert harness.prefill_lens() == [[20, 20], [20], [100], [10]]


def test_a_split_prompt_is_shared_while_it_is_computed(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 64})
    harness.submit(prompt_of(200), max_new=1, rid="first")
    harness.turn(2)
    harness.abort("first")
    again = harness.submit(prompt_of(200), max_new=1)
    harness.run()
    assert harness.answer(again).cached_tokens == 128
    harness.assert_as_expected(again)


# --- mixed


@pytest.mark.parametrize("overlap", [True, False])
def test_decode_rows_ride_along(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness({"chunked_prefill_size": 32, "enable_mixed_chunk": True}, overlap=overlap)
    running = [harness.submit(prompt_of(4, i), max_new=30, ignore_eos=True) for i in range(3)]
    harness.turn(3)
    harness.submit(prompt_of(100, 9), max_new=5)
    harness.run()
    harness.assert_as_expected()
    mixed = [step for step in harness.steps if step.mode is ForwardMode.MIXED]
    assert [step.num_tokens for step in mixed] == [32, 32, 32, 16]
    assert all(step.num_decode_rows == len(running) for step in mixed)


def test_too_many_decode_rows_take_turns_instead(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 16, "enable_mixed_chunk": True})
    for i in range(12):
        harness.submit(prompt_of(3, i), max_new=30, ignore_eos=True)
    harness.turn(12)
    before = len(harness.steps)
    harness.submit(prompt_of(60, 99), max_new=2)
    harness.run()
    harness.assert_as_expected()
    assert ForwardMode.MIXED not in harness.modes[before : before + 8]
    assert harness.modes[before : before + 4].count(ForwardMode.EXTEND) == 2


# --- sharing inside a batch


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefix_that_is_just_being_computed_is_waited_for(make_harness: Callable[..., Harness], page_size: int) -> None:
    harness = make_harness(page_size=page_size, num_pages=1024 // page_size)
    shared = prompt_of(48)
    for i in range(4):
        harness.submit(shared + prompt_of(8, i), max_new=3)
    harness.submit(prompt_of(20, 77), max_new=3)  # shares nothing and overtakes
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[56, 20], [8, 8, 8]]
    assert [harness.answer(f"r{i}").cached_tokens for i in range(5)] == [0, 48, 48, 48, 0]


def test_short_shared_prefixes_are_not_waited_for(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    shared = prompt_of(31)
    for i in range(3):
        harness.submit(shared + prompt_of(8, i), max_new=2)
    harness.run()
    assert harness.prefill_lens() == [[39, 39, 39]]
    harness.assert_as_expected()


def test_samples_of_one_long_prompt_compute_it_once(make_harness: Callable[..., Harness]) -> None:
    """n > 1 of a prompt that needs several chunks: the copies wait for the whole of it, not for its first chunk."""
    harness = make_harness({"chunked_prefill_size": 64}, num_pages=2048)
    prompt = prompt_of(170)
    for i in range(4):
        harness.submit(prompt, max_new=4, temperature=1.0, sampling_seed=i)
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[64], [64], [42], [1, 1, 1]]
    assert len({tuple(answer.token_ids) for answer in harness.transport.answers.values()}) == 4


@pytest.mark.parametrize(
    ("length", "page_size", "lens"),
    [
        (33, 1, [[33], [1] * 7]),
        (32, 1, [[32, 32], [1] * 6]),
        (12, 1, [[12] * 3, [1] * 5]),
        (20, 16, [[20] * 2, [4] * 6]),
        (16, 16, [[16] * 8]),
    ],
)
@pytest.mark.parametrize("is_cached", [False, True])
def test_samples_of_a_short_prompt_repeat_few_tokens(
    make_harness: Callable[..., Harness], length: int, page_size: int, lens: list[list[int]], is_cached: bool
) -> None:
    """Also where the prompt's beginning, common to all prompts, is cached."""
    harness = make_harness(page_size=page_size, num_pages=1024 // page_size)
    system = prompt_of(64, 99) if is_cached else []
    if is_cached:
        harness.submit(system, max_new=1)
        harness.run()
    before = len(harness.prefill_lens())
    for i in range(8):
        harness.submit(system + prompt_of(length), max_new=3, temperature=1.0, sampling_seed=i)
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens()[before:] == lens


def test_namespaces_do_not_wait_for_each_other(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    for key in ("a", "b"):
        harness.submit(prompt_of(50), max_new=1, extra_key=key)
    harness.run()
    assert harness.prefill_lens() == [[50, 50]]


def test_nothing_is_waited_for_without_a_tree(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"disable_radix_cache": True})
    for _ in range(2):
        harness.submit(prompt_of(50), max_new=1)
    harness.run()
    assert harness.prefill_lens() == [[50, 50]]


# --- what the step tells the runner


def test_flags_of_a_step(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()

    def flags(**request: Any) -> tuple[bool, bool, bool, bool]:
        harness.submit(prompt_of(5), max_new=1, **request)
        harness.run()
        step = harness.steps[-1]
        return (step.needs_sampling, step.needs_adjusting, step.needs_logprobs, step.needs_top_logprobs)

    assert flags() == (False, False, False, False)
    assert flags(temperature=0.7) == (True, False, False, False)
    assert flags(temperature=0.7, top_k=1) == (False, False, False, False)
    assert flags(frequency_penalty=0.5) == (False, True, False, False)
    assert flags(logit_bias={3: 1.0}) == (False, True, False, False)
    assert flags(return_logprob=True) == (False, False, True, False)
    assert flags(return_logprob=True, top_logprobs_num=2) == (False, False, True, True)


def test_seeds(make_harness: Callable[..., Harness]) -> None:
    """Given ones are passed on; others are drawn from --random-seed."""
    seeds = []
    for _ in range(2):
        harness = make_harness({"random_seed": 5})
        harness.submit([1], sampling_seed=-77, temperature=1.0)
        harness.submit([2], temperature=1.0)
        harness.submit([3], temperature=1.0)
        harness.run()
        seeds.append([state.seed for state in harness.steps[0].new_rows])
    assert seeds[0] == seeds[1] and seeds[0][0] == -77 and len(set(seeds[0])) == 3
