"""Control messages, idleness, shutdown."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.messages import (
    BatchTokenizedGenerateReqInput,
    Sample,
    ShutdownReq,
    TokenizedGenerateReqInput,
    WorkerAddress,
    WorkerReady,
    encode,
)
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput, FlushCacheReqOutput
from jaxserve.scheduler.control.freeze_gc import FreezeGCReq
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq, GetInternalStateReqOutput
from jaxserve.scheduler.control.set_internal_state import SetInternalStateReq
from jaxserve.types import SamplingParams


def test_a_batch_is_its_requests(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    for i in range(3):
        harness.submit(prompt_of(5, i))
    batch = BatchTokenizedGenerateReqInput(batch=list(harness.transport.inbox))  # type: ignore[arg-type]
    harness.transport.inbox = [batch]
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[5, 5, 5]]


def test_flush_when_idle(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit(prompt_of(50))
    harness.run()
    assert harness.scheduler.cache.shards[0].evictable_tokens > 0
    harness.control(FlushCacheReqInput())
    harness.turn()
    assert harness.control_replies() == [FlushCacheReqOutput(success=True)]
    assert harness.scheduler.cache.num_cached_tokens == 0
    again = harness.submit(prompt_of(50))
    harness.run()
    assert harness.answer(again).cached_tokens == 0


def test_flush_while_busy(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=1)
    for i in range(2):
        harness.submit(prompt_of(5, i), 20)
    harness.turn(2)
    harness.control(FlushCacheReqInput())
    harness.turn()
    reply = FlushCacheReqOutput(success=False, message="1 requests are running and 1 are waiting.")
    assert harness.control_replies() == [reply]


def test_flush_waits_for_idleness(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(2)
    harness.control(FlushCacheReqInput(timeout_s=100.0))
    harness.turn(2)
    assert harness.transport.replies == []
    harness.run()
    assert harness.control_replies() == [FlushCacheReqOutput(success=True)]
    assert harness.scheduler.cache.num_cached_tokens == 0


def test_flush_waits_no_longer_than_told(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5), 200, ignore_eos=True)
    harness.turn(2)
    harness.control(FlushCacheReqInput(timeout_s=1.0))
    harness.turn()
    harness.clock.now_s += 1.1
    harness.turn()
    assert [reply.success for reply in harness.control_replies()] == [False]
    harness.run()
    harness.assert_as_expected(rid)


def test_internal_state(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=2)
    for i in range(4):
        harness.submit(prompt_of(10, i), 10, ignore_eos=True)
    harness.turn(3)
    harness.control(GetInternalStateReq())
    harness.turn()
    (reply,) = harness.control_replies()
    assert isinstance(reply, GetInternalStateReqOutput)
    state = reply.internal_state
    assert (state["num_running_reqs"], state["num_waiting_reqs"], state["num_pending_tokens"]) == (2, 2, 20)
    assert state["num_used_tokens"] >= 20 and 0 < state["token_usage"] < 1
    assert state["runner"]["kind"] == "fake" and state["max_running_requests"] == 2
    harness.run()
    state = harness.scheduler.internal_state()
    assert (state["num_requests"], state["num_finished"], state["num_aborted"]) == (4, 4, 0)
    assert (state["generated_tokens"], state["prompt_tokens"], state["num_pending_tokens"]) == (40, 40, 0)


def test_a_leak_is_reported_and_repaired(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    harness = make_harness()
    harness.submit(prompt_of(20))
    harness.run()
    harness.scheduler.cache.shards[0].allocator.alloc(3)  # nobody will ever free these
    harness.scheduler.on_idle()
    assert "3" in caplog.text and "serving goes on" in caplog.text
    assert harness.scheduler.internal_state()["num_leaks_repaired"] == 1
    again = harness.submit(prompt_of(20))
    harness.run()
    harness.assert_as_expected(again)


def test_idle_work_is_done_once_after_a_quiet_moment(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    calls: list[float] = []
    harness.scheduler.on_idle = lambda: calls.append(harness.clock())  # type: ignore[method-assign]
    timeouts: list[float | None] = []
    recv = harness.transport.recv_messages
    harness.transport.recv_messages = lambda t: (timeouts.append(t), recv(t))[1]  # type: ignore[method-assign]
    harness.submit(prompt_of(5), 3)
    harness.turn(10)
    assert len(calls) == 1
    assert timeouts[-1] is None and 0.0 in timeouts and timeouts.count(0.1) == 2  # before and after
    harness.submit(prompt_of(5), 3)
    harness.turn(10)
    assert len(calls) == 2


def test_shutdown_finishes_what_is_there(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=1)
    rids = [harness.submit(prompt_of(5, i), 10) for i in range(3)]
    harness.send(ShutdownReq())
    harness.loop.run()
    harness.assert_as_expected(*rids)
    assert harness.transport.shut_down


def test_requests_after_shutdown_are_refused(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit(prompt_of(5), 10)
    harness.send(ShutdownReq())
    late = harness.submit(prompt_of(5), 10)
    harness.loop.run()
    finish = harness.answer(late).finish
    assert finish is not None and finish.status_code == 503
    harness.assert_as_expected("r0")


def test_a_message_for_somebody_else(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    harness = make_harness()
    harness.send(WorkerReady(worker=WorkerAddress("detokenizer")))
    harness.turn()
    assert "WorkerReady" in caplog.text


def test_log_lines(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    harness = make_harness({"decode_log_interval": 5})
    for _ in range(2):
        harness.submit(prompt_of(40), 12, ignore_eos=True)
        harness.run()
    lines = [record.getMessage() for record in caplog.records]
    prefill = [line for line in lines if line.startswith("Prefill batch")]
    assert "#new-seq: 1, #new-token: 40, #cached-token: 0, token usage: 0.08, #running-req: 1, #queue-req: 0" in prefill[0]
    assert "#new-token: 1, #cached-token: 39" in prefill[1]
    decode = [line for line in lines if line.startswith("Decode batch")]
    assert len(decode) == 4 and "gen throughput (token/s): " in decode[0]
    # One token per turn of 10 ms.
    assert "gen throughput (token/s): 100.00" in decode[1]


def test_the_first_decode_line_does_not_count_idle_time(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"decode_log_interval": 5})
    harness.turn(3)
    harness.clock.now_s += 1e6
    harness.scheduler.on_idle()
    harness.submit(prompt_of(4), 12, ignore_eos=True)
    harness.run()
    assert harness.scheduler.internal_state()["last_gen_throughput"] > 50


def test_a_request_of_another_kind_of_array(make_harness: Callable[..., Harness]) -> None:
    """input_ids may be a read-only view of a received frame, or of another integer type."""
    harness = make_harness()
    rid = harness.submit(prompt_of(9))
    message = harness.sent[rid]
    message.input_ids = message.input_ids.astype("int64")[::1]
    message.input_ids.flags.writeable = False
    harness.run()
    harness.assert_as_expected(rid)
    assert SimpleNamespace(**harness.scheduler.internal_state()).num_finished == 1


def test_options_change_while_the_scheduler_runs(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_rows=1)
    harness.control(SetInternalStateReq(server_args={"max_queued_requests": 1, "request_running_timeout_s": 5}))
    harness.turn()
    (reply,) = harness.control_replies()
    assert reply.updated and reply.server_args["max_queued_requests"] == 1
    assert harness.scheduler.internal_state()["request_running_timeout_s"] == 5
    running = harness.submit(prompt_of(5), 100, ignore_eos=True)
    harness.turn()
    waiting, refused = (harness.submit(prompt_of(5, i), 100, ignore_eos=True) for i in (1, 2))
    harness.turn(2)
    assert harness.answer(refused).finish.status_code == 503
    harness.clock.now_s += 6.0
    harness.run()
    assert harness.answer(running).finish.status_code == 503
    harness.assert_as_expected(waiting)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 4}, "server_args.page_size cannot be changed while the server runs"),
        ({"speculative_accept_threshold_acc": 0.5}, "server_args.speculative_accept_threshold_acc cannot be changed"),
        ({"max_queued_requests": "many"}, "server_args.max_queued_requests is wrong"),
        ({"max_queued_requests": -1}, "--max-queued-requests must be at least 0; got -1."),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(make_harness: Callable[..., Harness], change: Any, words: str) -> None:
    """And nothing that came with it is changed."""
    harness = make_harness()
    harness.control(SetInternalStateReq(server_args={"decode_log_interval": 7} | change))
    harness.turn()
    assert words in harness.control_replies()[0]
    assert harness.scheduler.internal_state()["decode_log_interval"] == 40


def test_samples_of_one_prompt_are_requests_of_their_own(make_harness: Callable[..., Harness]) -> None:
    """What arrives as one message gives the tokens of as many."""
    harness = make_harness(max_rows=4)
    prompt = prompt_of(12)
    for j in range(6):
        harness.submit(prompt, 6, rid=f"s{j}", temperature=1.0, sampling_seed=j - 1)
    first, *others = harness.transport.inbox
    assert isinstance(first, TokenizedGenerateReqInput)
    first.more_samples = [Sample(one.rid, one.sampling_params.sampling_seed) for one in others]  # type: ignore[attr-defined]
    harness.transport.inbox = [first]
    harness.run()
    harness.assert_as_expected()
    assert harness.scheduler.internal_state()["num_requests"] == 6


def test_a_prompt_crosses_the_border_once() -> None:
    def size(num_samples: int) -> int:
        samples = [Sample(f"request_{j}", j) for j in range(1, num_samples)]
        params = SamplingParams(temperature=1.0, sampling_seed=0)
        ids = np.arange(10_000, dtype=np.int32)
        return len(
            encode(TokenizedGenerateReqInput(rid="request_0", input_ids=ids, sampling_params=params, more_samples=samples))
        )

    assert size(1) > 40_000
    assert size(64) < 1.05 * size(1)


def test_freeze_gc(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    try:
        harness.control(FreezeGCReq())
        harness.turn()
        assert harness.control_replies()[0].num_frozen > 1000
    finally:
        gc.unfreeze()
