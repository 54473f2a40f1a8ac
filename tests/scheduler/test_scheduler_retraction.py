"""The KV cache runs out: who is retracted, that nobody's tokens change, and that it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from scheduler_harness import Harness, LetterDecoder, prompt_of

from jaxserve.cache.manager import CacheManager
from jaxserve.scheduler.batch import NeedsResults, ScheduleBatch
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.token_ratio import NewTokenRatio

# Reserves nothing for running requests, so that too many are admitted. (For those that ignore eos it always reserves
# everything; so these tests have an eos that is never sampled instead.)
CARELESS = {"schedule_conservativeness": 0.0}
NO_EOS = (1000,)


def submit_spread(harness: Harness, count: int, max_new: int, **request: Any) -> None:
    """Each is admitted by itself: admission holds nothing free for those that run."""
    for i in range(count):
        harness.submit(prompt_of(10, i), max_new=max_new, **request)
        harness.turn(4)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_retracted_requests_get_the_same_tokens(make_harness: Callable[..., Harness], overlap: bool, page_size: int) -> None:
    harness = make_harness(CARELESS, overlap=overlap, page_size=page_size, eos_token_ids=NO_EOS, num_pages=128 // page_size)
    submit_spread(harness, 8, max_new=60)
    harness.run()
    harness.assert_as_expected()
    retracted = [answer.times.num_retractions for answer in harness.transport.answers.values() if answer.times]
    assert sum(retracted) > 0
    assert harness.scheduler.internal_state()["num_retractions"] == sum(retracted)
    for times in (answer.times for answer in harness.transport.answers.values() if answer.times):
        assert len(times.retractions_s) == times.num_retractions < times.num_chunks  # each is computed again
        assert all(times.first_scheduled_s < moment < times.finished_s for moment in times.retractions_s)


def test_seeds_and_penalties_survive_a_retraction(make_harness: Callable[..., Harness]) -> None:
    """The fake runner checks that output_ids are those it produced, and samples with the seed."""
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=96)
    for i in range(6):
        harness.submit(prompt_of(10, i), 50, temperature=1.0, sampling_seed=i, presence_penalty=1.0)
        harness.turn(4)
    harness.run()
    harness.assert_as_expected()
    resumed = [state for step in harness.steps for state in step.new_rows if len(state.output_ids)]
    assert resumed and all(state.prompt_len == 10 for state in resumed)


def test_streams_go_on_where_they_stood(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=96)
    submit_spread(harness, 6, max_new=50, stream=True, return_logprob=True)
    harness.run()
    harness.assert_as_expected()  # the transport checks that no token is sent twice
    assert all(sum(len(part.logprobs) for part in answer.logprobs) == 50 for answer in harness.transport.answers.values())


def test_patterns_are_looked_for_across_a_retraction(make_harness: Callable[..., Harness]) -> None:
    """Nothing is scanned twice and nothing is left out: a request ends where the whole text first has 45 letters."""
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=96, text_decoder=LetterDecoder())
    submit_spread(harness, 6, max_new=50, stop_regex=["^[a-z]{45}", "[0-9]"])
    harness.run()
    answers = harness.transport.answers.values()
    assert [len(answer.token_ids) for answer in answers] == [45] * 6
    assert all(answer.finish and answer.finish.matched == LetterDecoder().decode(answer.token_ids) for answer in answers)
    assert sum(answer.times.num_retractions for answer in answers if answer.times) > 0


def test_the_fewest_outputs_give_way_first(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=110, max_rows=4)
    submit_spread(harness, 3, max_new=50)
    harness.run()
    retractions = [harness.answer(f"r{i}").times.num_retractions for i in range(3)]
    assert retractions[0] == 0 and retractions[2] >= 1
    assert harness.answer("r0").times.finished_s < harness.answer("r2").times.finished_s


def test_of_equal_requests_the_youngest_give_way_and_return_in_order(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=100, max_rows=4)
    with mock.patch("jaxserve.scheduler.prefill_adder.CLIP_MAX_NEW_TOKENS", 2):
        rids = [harness.submit(prompt_of(12, i), max_new=60) for i in range(4)]
        harness.run()
    harness.assert_as_expected()
    times = [harness.answer(rid).times for rid in rids]
    retractions = [time.num_retractions for time in times if time]
    assert retractions[0] == 0 and sum(retractions) > 1 and retractions == sorted(retractions)
    finished = [time.finished_s for time in times if time]
    assert finished == sorted(finished)


@pytest.mark.parametrize("way", ["retraction", "preemption"])
def test_planning_asks_for_results_instead_of_taking_them(make_harness: Callable[..., Harness], way: str) -> None:
    preempts = way == "preemption"
    args = {"enable_priority_scheduling": True} if preempts else CARELESS
    harness = make_harness(args, eos_token_ids=NO_EOS, num_pages=400 if preempts else 100, max_rows=2 if preempts else 4)
    asked: list[int] = []  # steps in flight when planning asked for their results

    def next_batch() -> ScheduleBatch | NeedsResults | None:
        num_in_flight, num_answers = harness.scheduler.num_in_flight, len(harness.transport.answers)
        plan = Scheduler.next_batch(harness.scheduler)
        assert (harness.scheduler.num_in_flight, len(harness.transport.answers)) == (num_in_flight, num_answers)
        if isinstance(plan, NeedsResults):
            asked.append(num_in_flight)
        return plan

    with mock.patch.object(harness.scheduler, "next_batch", next_batch):
        submit_spread(harness, 2 if preempts else 3, max_new=50, priority=0)
        harness.submit(prompt_of(20, 9), max_new=10, priority=50)
        harness.run()
    harness.assert_as_expected()
    assert asked and min(asked) > 0
    assert harness.scheduler.internal_state()["num_preemptions" if preempts else "num_retractions"] > 0


def test_retracted_requests_do_not_count_as_queued(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(CARELESS | {"max_queued_requests": 0}, eos_token_ids=NO_EOS, num_pages=100, max_rows=4)
    submit_spread(harness, 3, max_new=50)
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_retractions"] > 0


def test_the_lowest_priority_gives_way_first(make_harness: Callable[..., Harness]) -> None:
    args = CARELESS | {"retraction_policy": "priority", "enable_priority_scheduling": True, "disable_priority_preemption": True}
    harness = make_harness(args, eos_token_ids=NO_EOS, num_pages=110, max_rows=4)
    for i, priority in enumerate((1, 5, 5)):
        harness.submit(prompt_of(10, i), max_new=50, priority=priority)
        harness.turn(4)
    harness.run()
    assert harness.answer("r0").times.num_retractions >= 1 and harness.answer("r1").times.num_retractions == 0
    harness.assert_as_expected()


def test_room_for_many_steps_is_made_at_once(make_harness: Callable[..., Harness]) -> None:
    """One retraction per step would throw away a prompt's work at every step."""
    harness = make_harness(CARELESS, eos_token_ids=NO_EOS, num_pages=128)
    submit_spread(harness, 8, max_new=60)
    harness.run()
    decode_steps = [step for step in harness.steps if step.mode.name == "DECODE"]
    assert harness.scheduler.internal_state()["num_retractions"] < len(decode_steps) / 10


def test_a_half_computed_prompt_gives_way_before_the_last_request_fails(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(
        CARELESS | {"chunked_prefill_size": 8, "prefill_decode_interval": 8}, eos_token_ids=NO_EOS, num_pages=64
    )
    harness.submit(prompt_of(10), max_new=54)
    harness.turn(3)
    with mock.patch("jaxserve.scheduler.prefill_adder.PrefillAdder._fits_memory", return_value=True):
        harness.submit(prompt_of(60, 1), max_new=2)
        harness.run()
    harness.assert_as_expected()
    assert harness.answer("r1").times.num_retractions >= 1


def test_the_last_one_that_does_not_fit_is_told_so(make_harness: Callable[..., Harness]) -> None:
    """Cannot happen by the limits intake sets; if it does, it is an answer and not a hang."""
    harness = make_harness(eos_token_ids=NO_EOS)
    rid = harness.submit(prompt_of(10), max_new=20)
    harness.turn(4)
    with mock.patch.object(CacheManager, "grow_rows", return_value=False):
        harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None and finish.type == "abort" and finish.status_code == 500
    assert harness.answer(rid).token_ids == harness.expected(rid)[: len(harness.answer(rid).token_ids)]


def test_a_request_that_can_never_be_scheduled_is_told_so(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(10))
    with mock.patch.object(CacheManager, "grow", return_value=False):
        harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None and finish.type == "abort" and finish.status_code == 500


# --- new_token_ratio


def test_the_ratio_falls_with_steps_that_went_well() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(300):
        ratio.after_decode()
    assert ratio.value == pytest.approx(0.7 * (1 + 0.14) / 2)
    for _ in range(400):
        ratio.after_decode()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)


def test_the_ratio_after_a_retraction() -> None:
    ratio = NewTokenRatio(1.0)
    ratio.after_retraction(num_decoded_tokens=300, num_max_new_tokens=999, num_requests=10)
    assert ratio.value == pytest.approx(0.5)
    ratio.after_retraction(num_decoded_tokens=300, num_max_new_tokens=310, num_requests=10)
    assert ratio.value == 1.0


def test_conservativeness_is_capped() -> None:
    assert NewTokenRatio(5.0).value == 1.0
