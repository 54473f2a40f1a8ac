"""Aborts in every state: one terminal message with the tokens so far, nothing leaks, others are not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.messages import AbortReq, BatchTokenizedGenerateReqInput
from jaxserve.scheduler.loop import SEQUENCES_PER_ROUND
from jaxserve.scheduler.requests import ABORT_MESSAGE, ABORT_MESSAGE_OF_WAITING
from jaxserve.types import FinishReason

ABORTED = FinishReason.abort(ABORT_MESSAGE)
ABORTED_WAITING = FinishReason.abort(ABORT_MESSAGE_OF_WAITING)
both_loops = pytest.mark.parametrize("overlap", [True, False])


def assert_aborted(harness: Harness, *rids: str) -> None:
    for rid in rids:
        answer = harness.answer(rid)
        assert answer.finish in (ABORTED, ABORTED_WAITING), f"{rid}: {answer.finish}"
        assert answer.token_ids == harness.expected(rid)[: len(answer.token_ids)]


def test_waiting(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=1)
    running, waiting = harness.submit(prompt_of(5), 30, ignore_eos=True), harness.submit(prompt_of(6))
    harness.turn(3)
    harness.abort(waiting)
    harness.turn()
    assert harness.answer(waiting).finish == FinishReason.abort("Abort in waiting queue")
    assert harness.answer(waiting).prompt_tokens == 6
    harness.run()
    harness.assert_as_expected(running)


@both_loops
def test_chunked_request(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, overlap=overlap, page_size=4, num_pages=64)
    chunked, other = harness.submit(prompt_of(100)), harness.submit(prompt_of(30, 1))
    harness.turn(3)
    harness.abort(chunked)
    harness.run()
    assert_aborted(harness, chunked)
    harness.assert_as_expected(other)


@both_loops
@pytest.mark.parametrize("turns", range(1, 8))
def test_running_at_any_moment(make_harness: Callable[..., Harness], overlap: bool, turns: int) -> None:
    harness = make_harness(overlap=overlap)
    gone, stays = harness.submit(prompt_of(5), 30, ignore_eos=True), harness.submit(prompt_of(6), 9, stream=True)
    harness.turn(turns)
    harness.abort(gone)
    harness.turn()
    assert_aborted(harness, gone)
    harness.run()
    harness.assert_as_expected(stays)


@both_loops
def test_last_step_in_flight(make_harness: Callable[..., Harness], overlap: bool) -> None:
    """It could not have been stopped any more, but was not answered yet."""
    harness = make_harness(overlap=overlap)
    rid = harness.submit(prompt_of(5), 1)
    if overlap:
        harness.turn()
        assert harness.scheduler.num_in_flight == 1
    harness.abort(rid)
    harness.run()
    assert_aborted(harness, rid)


def test_no_tokens_wanted_in_flight(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5), 0)
    harness.turn()
    harness.abort(rid)
    harness.run()
    assert_aborted(harness, rid)


def test_retracted(make_harness: Callable[..., Harness]) -> None:
    """A retracted request waits with tokens it has not sent yet; they come with the abort."""
    harness = make_harness({"schedule_conservativeness": 0.0}, num_pages=110, max_rows=4, eos_token_ids=(1000,))
    for i in range(3):
        harness.submit(prompt_of(10, i), max_new=50)
        harness.turn(4)
    while not harness.scheduler.internal_state()["num_retractions"]:
        harness.turn()
    harness.abort("r2", exact=True)
    harness.run()
    assert_aborted(harness, "r2")
    assert harness.answer("r2").times.num_retractions == 1 and len(harness.answer("r2").token_ids) > 5
    harness.assert_as_expected("r0", "r1")


def test_all(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, max_rows=3)
    rids = [harness.submit(prompt_of(40, i), 20) for i in range(6)]
    harness.turn(5)
    harness.abort(abort_all=True)
    harness.run()
    assert_aborted(harness, *rids)


def test_by_prefix_and_exactly(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    for rid in ("job", "job_1", "job_2", "other"):
        harness.submit(prompt_of(5), 20, rid=rid, ignore_eos=True)
    harness.turn(2)
    harness.abort("job", exact=True)
    harness.turn()
    assert_aborted(harness, "job")
    harness.abort("job_")
    harness.run()
    assert_aborted(harness, "job_1", "job_2")
    harness.assert_as_expected("other")


def test_nobody(make_harness: Callable[..., Harness]) -> None:
    """Unknown, finished and empty rids are no reason to touch anybody."""
    harness = make_harness()
    done = harness.submit(prompt_of(5), 2)
    harness.run()
    running = harness.submit(prompt_of(5), 20)
    harness.turn(2)
    for how in ({"rid": "unknown"}, {"rid": done}, {"rid": ""}, {"rid": "", "exact": True}):
        harness.abort(**how)
    harness.run()
    harness.assert_as_expected(done, running)


def test_twice(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5), 20)
    harness.turn(3)
    harness.abort(rid)
    harness.abort(rid)
    harness.run()
    assert_aborted(harness, rid)


def test_the_aborted_rid_may_be_used_again_at_once(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5), 20)
    harness.turn(2)
    harness.abort(rid)
    harness.turn()
    del harness.transport.answers[rid]
    harness.submit(prompt_of(5), 20, rid=rid)
    harness.run()
    harness.assert_as_expected(rid)


@both_loops
def test_nan_logits_end_their_request_only(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap, nan_token=77)
    bad, good = harness.submit([5, 77, 5], return_logprob=True), harness.submit([5, 7], return_logprob=True, stream=True)
    harness.run()
    finish = harness.answer(bad).finish
    assert finish is not None and finish.type == "abort" and finish.status_code == 500 and "NaN" in (finish.message or "")
    with mock.patch.object(harness.runner, "_nan_token", None):
        harness.assert_as_expected(good)
    given = [x for part in harness.answer(good).logprobs for x in part.logprobs.tolist()]
    assert given == pytest.approx([-(token + 1) / 101 for token in harness.answer(good).token_ids])


@both_loops
def test_what_a_request_with_nan_logits_computed_is_not_reused(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap, nan_token=77)
    shared = [token % 50 for token in prompt_of(40)]
    good = harness.submit(shared[:20], 1)
    harness.run()
    bad = harness.submit([*shared, 77, 5])
    harness.run()
    finish = harness.answer(bad).finish
    assert finish is not None and finish.status_code == 500
    later = [harness.submit([*shared, 77, 5], 1), harness.submit([*shared, 6], 1)]
    harness.run()
    # What the first request brought is still there; what the one with NaN brought is not.
    assert [harness.answer(rid).cached_tokens for rid in (good, *later)] == [0, 20, 20]


def test_nan_logits_while_others_share_the_prefix(make_harness: Callable[..., Harness]) -> None:
    """Those that run already go on with the pages they hold; nobody new gets them."""
    harness = make_harness({"prefill_decode_interval": 0}, overlap=True, nan_token=77)
    shared = [token % 50 for token in prompt_of(40)]
    bad = harness.submit([*shared, 77])
    sharer = harness.submit([*shared, 6], 30, ignore_eos=True)  # held back until the first step was launched
    harness.turn(5)
    assert harness.answer(bad).finish is not None
    late = harness.submit([*shared, 7], 5)
    harness.run()
    assert (harness.answer(sharer).cached_tokens, harness.answer(late).cached_tokens) == (40, 0)


@both_loops
def test_a_batch_comes_and_leaves_beside_a_running_request(make_harness: Callable[..., Harness], overlap: bool) -> None:
    """Every round takes a part of it; the running request waits for no more than one prompt's step in between."""
    harness = make_harness(overlap=overlap, max_rows=2)
    runs = harness.submit(prompt_of(5), 60, ignore_eos=True, stream=True)
    harness.turn(3)
    count = 8 * SEQUENCES_PER_ROUND
    sent = [harness.submit(prompt_of(3), 50, ignore_eos=True, rid=f"b{i}") for i in range(count)]
    harness.transport.inbox = []
    part = [harness.sent[rid] for rid in sent]
    for first in range(0, count, SEQUENCES_PER_ROUND):
        harness.send(BatchTokenizedGenerateReqInput(batch=part[first : first + SEQUENCES_PER_ROUND]))
    for first in reversed(range(0, count, SEQUENCES_PER_ROUND)):
        harness.send(AbortReq(rids=sent[first : first + SEQUENCES_PER_ROUND]))
    for _ in range(8):
        before = len(harness.answer(runs).token_ids)
        harness.turn(2)
        assert len(harness.answer(runs).token_ids) > before, "two rounds without a token"
    harness.turn()
    assert_aborted(harness, *sent)
    harness.run()
    harness.assert_as_expected(runs)
