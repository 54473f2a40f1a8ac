"""Blocked input: new requests are held in order while others go on, an abort reaches them, and unblocking is a barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.messages import BatchTokenizedGenerateReqInput, ShutdownReq
from jaxserve.scheduler.control.block_input import BlockInputReqInput, BlockInputReqOutput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.release_input import ReleaseInputReq
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReq
from jaxserve.scheduler.control.unblock_input import UnblockInputReqInput, UnblockInputReqOutput
from jaxserve.scheduler.control.update_weights_from_disk import UpdateWeightFromDiskReqInput

both_loops = pytest.mark.parametrize("overlap", [True, False])


def block(harness: Harness) -> None:
    harness.control(BlockInputReqInput())
    harness.turn()
    assert harness.control_replies()[-1] == BlockInputReqOutput()


def unblock(harness: Harness) -> None:
    """Both parts; the client sends the second one when all have answered the first."""
    harness.control(UnblockInputReqInput())
    harness.control(ReleaseInputReq())


def held(harness: Harness) -> int:
    state = harness.scheduler.internal_state()
    assert state["is_input_blocked"] or not state["num_blocked_reqs"]
    return int(state["num_blocked_reqs"])


@both_loops
@pytest.mark.parametrize("turns", range(1, 5))
def test_those_that_run_go_on_and_new_ones_are_held(make_harness: Callable[..., Harness], turns: int, overlap: bool) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, overlap=overlap, page_size=4, num_pages=128, max_rows=2)
    for i, (length, max_new) in enumerate(((40, 9), (6, 12), (5, 1))):
        harness.submit(prompt_of(length, i), max_new, temperature=0.9, sampling_seed=i, ignore_eos=True)
    harness.turn(turns)
    block(harness)
    late = [harness.submit(prompt_of(9, 9 + i), 5) for i in range(3)]
    harness.run()
    harness.assert_as_expected("r0", "r1", "r2")
    assert held(harness) == 3 and not set(late) & set(harness.transport.answers)
    assert harness.scheduler.load().num_waiting == 0
    unblock(harness)
    harness.run()
    harness.assert_as_expected()
    assert held(harness) == 0 and not harness.scheduler.input_gate.is_blocked
    assert harness.scheduler.internal_state()["num_requests"] == 6


def test_they_go_on_in_order_before_the_next_step_is_planned(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"schedule_policy": "fcfs"}, max_rows=1)
    block(harness)
    for i in range(4):
        harness.submit(prompt_of(5, i), 3, ignore_eos=True)
        harness.turn()
    unblock(harness)
    late = harness.submit(prompt_of(5, 4), 3, ignore_eos=True)
    harness.turn()
    assert len(harness.steps) == 1
    harness.run()
    harness.assert_as_expected()
    assert list(harness.transport.answers) == ["r0", "r1", "r2", "r3", late]


def test_nothing_goes_on_until_all_have_been_told(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    block(harness)
    harness.submit(prompt_of(5), 3)
    harness.control(UnblockInputReqInput())
    harness.turn(3)
    assert harness.control_replies()[-1] == UnblockInputReqOutput()
    harness.submit(prompt_of(5, 1), 3)
    harness.turn(3)
    assert held(harness) == 2 and not harness.steps
    harness.control(BlockInputReqInput())  # before the second part of unblocking, which then means nothing
    harness.control(ReleaseInputReq())
    harness.turn(3)
    assert held(harness) == 2 and not harness.steps
    unblock(harness)
    harness.run()
    harness.assert_as_expected()


def test_blocking_twice_and_unblocking_what_is_open_are_no_errors(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    unblock(harness)
    harness.turn()
    assert harness.control_replies()[0] == UnblockInputReqOutput("Input was not blocked.")
    for _ in range(2):
        block(harness)
    harness.submit(prompt_of(5), 3)
    harness.turn()
    assert held(harness) == 1
    for _ in range(2):
        unblock(harness)
    harness.run()
    harness.assert_as_expected()


def test_the_loop_waits_on_the_socket_while_it_holds_requests_only(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    timeouts: list[float | None] = []
    recv = harness.transport.recv_messages
    harness.transport.recv_messages = lambda t: (timeouts.append(t), recv(t))[1]  # type: ignore[method-assign]
    block(harness)
    harness.submit(prompt_of(5), 3)
    harness.turn(3)
    assert harness.scheduler.is_idle and not harness.scheduler.is_drained
    assert timeouts[-1] is None
    assert harness.scheduler.internal_state()["num_leaks_repaired"] == 0


def test_the_cache_can_be_flushed_and_weights_replaced_meanwhile(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    block(harness)
    harness.submit(prompt_of(5), 3)
    harness.control(FlushCacheReqInput())
    harness.turn()
    assert harness.control_replies()[-1] == FlushCacheReqOutput(success=True)
    harness.control(UpdateWeightFromDiskReqInput(model_path="other"))
    harness.run()
    assert harness.control_replies()[-1].success and held(harness) == 1
    unblock(harness)
    harness.run()
    assert harness.answer("r0").finish is not None


def abort_exact(harness: Harness) -> list[str]:
    for rid in ("r1", "r3"):
        harness.abort(rid, exact=True)
    return ["r1", "r3"]


def abort_prefix(harness: Harness) -> list[str]:
    harness.abort("r2")
    return ["r2"]


def abort_all(harness: Harness) -> list[str]:
    harness.abort(abort_all=True)
    return ["r0", "r1", "r2", "r3"]


def pause_abort(harness: Harness) -> list[str]:
    harness.control(PauseGenerationReqInput(mode="abort"))
    return ["r0", "r1", "r2", "r3"]


def abort_by_update(harness: Harness) -> list[str]:
    harness.control(UpdateWeightFromDiskReqInput(model_path="other", abort_all_requests=True))
    return ["r0", "r1", "r2", "r3"]


@both_loops
@pytest.mark.parametrize("abort", [abort_exact, abort_prefix, abort_all, pause_abort, abort_by_update])
def test_an_abort_reaches_those_that_are_held_at_once(make_harness: Callable[..., Harness], abort: Any, overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    harness.submit(prompt_of(5), 30, ignore_eos=True)
    harness.turn(3)
    block(harness)
    for i in range(1, 4):
        harness.submit(prompt_of(5, i), 4)
    harness.turn()
    assert held(harness) == 3
    ended = abort(harness)
    if abort is abort_by_update:
        harness.run()  # the weights are looked at on another thread
    else:
        harness.turn(2)
    for rid in ended:  # the transport checks that no message follows
        answer = harness.answer(rid)
        assert answer.finish is not None and answer.finish.type == "abort" and answer.finish.status_code is None
        assert rid == "r0" or not answer.token_ids
    assert held(harness) == len({"r1", "r2", "r3"} - set(ended))
    if abort is pause_abort:
        harness.scheduler.resume()
    unblock(harness)
    harness.run()
    for rid in {"r0", "r1", "r2", "r3"} - set(ended):
        harness.assert_as_expected(rid)
    assert harness.scheduler.internal_state()["num_aborted"] == len(ended)


def test_one_sample_can_be_aborted_alone(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    block(harness)
    rids = [harness.submit(prompt_of(5, i), 4) for i in range(3)]
    messages = [harness.sent[rid] for rid in rids]
    harness.transport.inbox.clear()
    harness.send(BatchTokenizedGenerateReqInput(batch=messages))
    harness.turn()
    harness.abort("r1", exact=True)
    harness.turn()
    assert list(harness.transport.answers) == ["r1"] and held(harness) == 2
    unblock(harness)
    harness.run()
    harness.assert_as_expected("r0", "r2")


def test_a_rid_that_is_held_is_in_use(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    block(harness)
    harness.submit(prompt_of(5), 3, rid="a")
    harness.turn()
    first = harness.sent["a"]
    harness.submit(prompt_of(6), 3, rid="a")
    harness.turn()
    assert "in use" in (harness.transport.answers.pop("a").finish.message or "")  # type: ignore[union-attr]
    unblock(harness)
    harness.run()
    assert harness.answer("a").prompt_tokens == len(first.input_ids)


def test_the_limit_of_the_queue_holds(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"max_queued_requests": 2})
    block(harness)
    for i in range(3):
        harness.submit(prompt_of(5, i), 3)
    harness.turn()
    assert held(harness) == 2 and harness.answer("r2").finish.status_code == 503  # type: ignore[union-attr]
    harness.control(SetInternalStateReq(server_args={"max_queued_requests": 100}))
    unblock(harness)
    harness.run()
    harness.assert_as_expected("r0", "r1")


def test_time_outs_begin_when_they_go_on(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"request_waiting_timeout_s": 10.0})
    block(harness)
    harness.submit(prompt_of(5), 3)
    harness.turn()
    harness.clock.now_s += 100.0
    unblock(harness)
    harness.run()
    harness.assert_as_expected()


@pytest.mark.parametrize("is_unblocking", [True, False])
def test_a_shutdown_lets_them_go_on_and_end(make_harness: Callable[..., Harness], is_unblocking: bool) -> None:
    harness = make_harness()
    harness.submit(prompt_of(5), 10, ignore_eos=True)
    harness.turn(2)
    block(harness)
    for i in range(1, 4):
        harness.submit(prompt_of(5, i), 10)
    harness.turn()
    if is_unblocking:
        harness.control(UnblockInputReqInput())
    harness.send(ShutdownReq())
    harness.loop.run()
    harness.assert_as_expected()
    assert harness.transport.shut_down
