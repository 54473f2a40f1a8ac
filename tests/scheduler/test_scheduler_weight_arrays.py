"""Weights that are handed over as arrays, with the fake runner: who goes on with what, and which version each token bears."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_contents import LOST_TENSORS, weights_of
from scheduler_harness import Harness, prompt_of, until_replied

from jaxserve.commands import CheckTensors, ReplaceTensors
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.update_weights_from_arrays import UpdateWeightsFromArraysReq

both_loops = pytest.mark.parametrize("overlap", [True, False])


def update(harness: Harness, number: int = 1, *, flush_cache: bool = True, abort: bool = False, partial: bool = False) -> None:
    harness.control(
        UpdateWeightsFromArraysReq(
            handover=number,
            partial=partial,
            weight_version=f"v{number}",
            abort_all_requests=abort,
            flush_cache=flush_cache,
        )
    )


@both_loops
def test_running_requests_end_with_the_old_weights(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    early = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(4)
    update(harness, partial=True)
    while CheckTensors(1, partial=True) not in harness.runner.commands or not harness.scheduler._waiting.only_begun:
        harness.turn()  # a request that comes before the check is done may still begin with the old ones
    late = harness.submit(prompt_of(5), 20, ignore_eos=True)
    assert until_replied(harness).success
    harness.run()
    assert set(harness.answer(early).versions) == {"default"}
    assert set(harness.answer(late).versions) == {"v1"}
    assert harness.answer(late).cached_tokens == 0
    assert harness.runner.commands == [CheckTensors(1, partial=True), ReplaceTensors(1, partial=True)]


@both_loops
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pauses", [True, False])
def test_with_its_cache_kept_a_request_goes_on_at_once(
    make_harness: Callable[..., Harness], overlap: bool, stream: bool, pauses: bool
) -> None:
    """And each token bears the version of the weights that drew it, also where tokens are sent together."""
    harness = make_harness(overlap=overlap)
    harness.runner.reads_old_kv = True
    prompt = prompt_of(6)
    rid = harness.submit(prompt, 20, ignore_eos=True, stream=stream)
    harness.turn(6)
    if pauses:
        harness.control(PauseGenerationReqInput(mode="in_place"))
        harness.turn(3)
    update(harness, flush_cache=False)
    reply = until_replied(harness, 1 + pauses)
    assert (reply.success, reply.num_paused_requests) == (True, int(pauses))
    if pauses:
        harness.control(ContinueGenerationReqInput())
    harness.run()
    versions, tokens = harness.answer(rid).versions, harness.answer(rid).token_ids
    num_old = versions.count("default")
    assert 0 < num_old < 20
    assert versions == ["default"] * num_old + ["v1"] * (20 - num_old)
    history = [*prompt]
    for token, version in zip(tokens, versions, strict=True):
        weights = 0 if version == "default" else weights_of("1")
        assert token == harness.runner.expected_tokens(history, 1, stop_ids=(), weights=weights)[0]
        history.append(token)


@both_loops
def test_retracted_requests_are_computed_again(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    rid = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(6)
    harness.control(PauseGenerationReqInput(mode="retract"))
    update(harness)
    reply = until_replied(harness, 2)
    assert (reply.success, reply.num_paused_requests) == (True, 1)
    harness.control(ContinueGenerationReqInput())
    harness.run()
    versions = harness.answer(rid).versions
    assert versions == sorted(versions) and set(versions) == {"default", "v1"} and len(versions) == 20


@both_loops
def test_what_is_refused_changes_nothing(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    rid = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(4)
    update(harness, -1, abort=True)
    reply = until_replied(harness)
    assert (reply.success, reply.message) == (False, "-1 is wrong.")
    harness.run()
    assert len(harness.answer(rid).token_ids) == 20
    assert set(harness.answer(rid).versions) == {"default"}


@both_loops
def test_lost_weights_serve_nobody_until_there_are_others(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    update(harness, LOST_TENSORS)
    reply = until_replied(harness)
    assert (reply.success, reply.message) == (False, "The weights are gone.")
    refused = harness.submit(prompt_of(5), 5)
    harness.turn(3)
    finish = harness.answer(refused).finish
    assert finish is not None and finish.status_code == 503
    update(harness, 2)
    assert until_replied(harness, 2).success
    rid = harness.submit(prompt_of(5), 5, ignore_eos=True)
    harness.run()
    assert harness.answer(rid).token_ids == harness.runner.expected_tokens(
        prompt_of(5), 5, stop_ids=(), weights=weights_of("2")
    )


def test_the_loop_is_woken_when_a_command_is_done(make_harness: Callable[..., Harness]) -> None:
    """It need not sleep until it looks the next time: neither behind the check nor behind the replacement."""
    harness = make_harness()
    update(harness)
    assert until_replied(harness).success
    assert harness.transport.num_woken == len(harness.runner.commands) == 2
