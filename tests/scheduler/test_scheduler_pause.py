"""Pausing generation in its three modes, and slowing it down: nobody's tokens change, nobody is lost, nothing spins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.messages import ShutdownReq
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput, ContinueGenerationReqOutput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput, PauseGenerationReqOutput
from jaxserve.scheduler.control.slow_down import SlowDownReqInput

both_loops = pytest.mark.parametrize("overlap", [True, False])
MODES = ("retract", "in_place")


def pause(harness: Harness, mode: Any) -> None:
    """After this nothing is launched."""
    harness.control(PauseGenerationReqInput(mode=mode))
    harness.turn()
    assert harness.control_replies()[-1] == PauseGenerationReqOutput()
    assert harness.scheduler.num_in_flight == 0
    num_steps = len(harness.steps)
    harness.turn(3)
    assert len(harness.steps) == num_steps
    assert harness.scheduler.is_idle, "the loop would spin"


def resume(harness: Harness) -> None:
    harness.control(ContinueGenerationReqInput())
    harness.turn()
    assert harness.control_replies()[-1] == ContinueGenerationReqOutput()


@both_loops
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turns", range(1, 7))
def test_tokens_are_those_without_the_pause(make_harness: Callable[..., Harness], mode: str, turns: int, overlap: bool) -> None:
    """Whatever a request is doing when the pause comes: waiting, half computed, decoding, about to end."""
    harness = make_harness(
        {"chunked_prefill_size": 16, "stream_interval": 2}, overlap=overlap, page_size=4, num_pages=128, max_rows=3
    )
    for i, (length, max_new) in enumerate(((40, 9), (6, 12), (5, 1), (7, 0), (8, 6))):
        harness.submit(prompt_of(length, i), max_new, stream=i % 2 == 0, temperature=0.9, sampling_seed=i, ignore_eos=True)
    harness.turn(turns)
    pause(harness, mode)
    late = harness.submit(prompt_of(9, 9))
    harness.turn(2)
    assert late not in harness.transport.answers
    resume(harness)
    harness.run()
    harness.assert_as_expected()


@both_loops
def test_retract_lets_the_cache_be_flushed(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    for i in range(3):
        harness.submit(prompt_of(20, i), 20, ignore_eos=True)
    harness.turn(5)
    pause(harness, "retract")
    state = harness.scheduler.internal_state()
    assert (state["num_running_reqs"], state["num_waiting_reqs"], state["num_used_tokens"]) == (0, 3, 0)
    assert state["is_paused"] and harness.scheduler.cache.check().is_clean
    harness.control(FlushCacheReqInput())
    harness.turn()
    assert harness.control_replies()[-1] == FlushCacheReqOutput(success=True)
    assert harness.scheduler.cache.num_cached_tokens == 0
    resume(harness)
    harness.run()
    harness.assert_as_expected()
    assert [harness.answer(f"r{i}").times.num_retractions for i in range(3)] == [1, 1, 1]  # type: ignore[union-attr]


def test_in_place_keeps_the_pages(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit(prompt_of(20), 20, ignore_eos=True)
    harness.turn(5)
    used = harness.scheduler.load().used_tokens
    pause(harness, "in_place")
    assert harness.scheduler.load().used_tokens == used
    harness.scheduler.on_idle()
    harness.control(FlushCacheReqInput())
    harness.turn()
    assert not harness.control_replies()[-1].success
    num_prefills = len(harness.prefill_lens())
    resume(harness)
    harness.run()
    harness.assert_as_expected()
    assert len(harness.prefill_lens()) == num_prefills
    assert harness.scheduler.internal_state()["num_leaks_repaired"] == 0


@both_loops
def test_abort_ends_what_is_there_and_lets_new_ones_wait(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, overlap=overlap, max_rows=2)
    for i in range(4):
        harness.submit(prompt_of(20, i), 30, ignore_eos=True)
    harness.turn(4)
    pause(harness, "abort")
    for i in range(4):
        answer = harness.answer(f"r{i}")
        assert answer.finish is not None and answer.finish.type == "abort" and answer.finish.status_code is None
        assert answer.token_ids == harness.expected(f"r{i}")[: len(answer.token_ids)]
    late = harness.submit(prompt_of(9, 9))
    harness.turn(3)
    assert late not in harness.transport.answers
    resume(harness)
    harness.run()
    harness.assert_as_expected(late)


def test_the_loop_waits_for_messages_while_paused(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    timeouts: list[float | None] = []
    recv = harness.transport.recv_messages
    harness.transport.recv_messages = lambda t: (timeouts.append(t), recv(t))[1]  # type: ignore[method-assign]
    harness.submit(prompt_of(5), 30, ignore_eos=True)
    harness.turn(3)
    pause(harness, "in_place")
    assert timeouts[-1] is None
    harness.control(FlushCacheReqInput(timeout_s=50.0))
    harness.turn(3)
    assert timeouts[-1] == 0.05, "a control request waits: it is looked after now and then"
    harness.abort(abort_all=True)
    harness.turn(2)
    assert harness.control_replies()[-1] == FlushCacheReqOutput(success=True)
    assert harness.answer("r0").finish is not None


def test_a_second_pause_applies_its_mode_and_a_continue_without_pause_is_no_error(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.control(ContinueGenerationReqInput())
    harness.turn()
    assert harness.control_replies() == [ContinueGenerationReqOutput("Generation was not paused.")]
    harness.submit(prompt_of(5), 30, ignore_eos=True)
    harness.turn(3)
    pause(harness, "in_place")
    pause(harness, "retract")
    assert harness.scheduler.internal_state()["num_running_reqs"] == 0
    resume(harness)
    harness.run()
    harness.assert_as_expected()


def test_the_time_of_a_pause_does_not_count_for_time_outs(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"request_waiting_timeout_s": 10.0, "request_running_timeout_s": 10.0}, max_rows=1)
    for i in range(2):
        harness.submit(prompt_of(5, i), 20, ignore_eos=True)
    harness.turn(3)
    pause(harness, "in_place")
    harness.submit(prompt_of(5, 2), 5)
    harness.clock.now_s += 100.0
    harness.turn()
    resume(harness)
    harness.run()
    harness.assert_as_expected()


def test_the_queue_keeps_its_limit_while_paused(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"max_queued_requests": 1})
    harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(3)
    pause(harness, "retract")
    harness.submit(prompt_of(5, 1), 4)
    refused = harness.submit(prompt_of(5, 2), 4)
    harness.turn()
    assert harness.answer(refused).finish.status_code == 503  # type: ignore[union-attr]
    resume(harness)
    harness.run()
    harness.assert_as_expected("r0", "r1")


def test_shutdown_ends_a_pause(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit(prompt_of(5), 10)
    harness.turn(2)
    pause(harness, "retract")
    harness.send(ShutdownReq())
    harness.loop.run()
    harness.assert_as_expected()
    assert harness.transport.shut_down


@both_loops
def test_slow_down_delays_steps_but_not_replies(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    harness.control(SlowDownReqInput(forward_sleep_time=1.0))
    harness.submit(prompt_of(5), 5, ignore_eos=True, stream=True)
    harness.turn(2)
    assert len(harness.steps) == 1 and len(harness.answer("r0").token_ids) == 1
    assert harness.scheduler.wait_s == 0.05
    harness.turn(50)  # half a second
    assert len(harness.steps) == 1
    harness.turn(50)
    assert len(harness.steps) == 2
    harness.control(SlowDownReqInput(forward_sleep_time=None))
    harness.turn(4)
    assert len(harness.steps) > 3
    harness.run()
    harness.assert_as_expected()
    assert [reply.forward_sleep_time for reply in harness.control_replies()] == [1.0, None]
