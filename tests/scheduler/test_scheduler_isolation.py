"""What goes wrong with one request or one message stays there; a step that fails ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from scheduler_harness import Harness, LetterDecoder, prompt_of

from jaxserve.messages import AbortReq, ControlReply, ControlRequest
from jaxserve.scheduler.control.declaration import ControlError
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.intake import Intake

POISON = 77


class FailingDecoder(LetterDecoder):
    """Cannot decode one token."""

    def decode(self, token_ids: list[int]) -> str:
        if POISON in token_ids:
            raise IndexError(f"no such token: {POISON}")
        return super().decode(token_ids)


@pytest.fixture
def broken_intake() -> Any:
    """Fails, for no reason that anybody thought of, on requests of a certain id."""
    build = Intake.build

    def fail_on_some(intake: Intake, message: Any) -> Any:
        if message.rid.startswith("bad"):
            raise RuntimeError("out of luck")
        return build(intake, message)

    with mock.patch.object(Intake, "build", fail_on_some):
        yield


def assert_failed(harness: Harness, rid: str, words: str) -> None:
    finish = harness.answer(rid).finish
    assert finish is not None
    assert (finish.type, finish.status_code, finish.err_type) == ("abort", 500, "InternalServerError")
    assert words in (finish.message or "")


@pytest.mark.usefixtures("broken_intake")
def test_an_unexpected_error_in_the_intake(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    before = harness.submit(prompt_of(5), 10)
    harness.turn(2)
    harness.submit(prompt_of(5, 1), rid="bad")
    after = harness.submit(prompt_of(5, 2))
    harness.run()
    harness.assert_as_expected(before, after)
    assert_failed(harness, "bad", "failed to take the request in; the server's log says more")
    assert harness.answer("bad").prompt_tokens == 5


@pytest.mark.parametrize("overlap", [True, False])
def test_a_decoder_that_fails_on_one_request(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap, text_decoder=FailingDecoder(), eos_token_ids=(1000,))
    stop = {"stop": ["this never comes up"]}
    prompts = [prompt_of(6, seed) for seed in range(12)]
    rids = [harness.submit(prompt, 40, **stop) for prompt in prompts]
    harness.run()
    hit = [rid for rid in rids if POISON in harness.expected(rid)]
    assert 0 < len(hit) < len(rids), "the test is void"
    for rid in hit:
        assert_failed(harness, rid, "failed to look at the newest token; the server's log says more")
        tokens = harness.answer(rid).token_ids
        assert tokens == harness.expected(rid)[: len(tokens)] and tokens[-1] == POISON
    harness.assert_as_expected(*(rid for rid in rids if rid not in hit))


def test_a_message_whose_handler_fails_does_not_end_the_loop(
    make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5))
    harness.turn()
    with mock.patch.object(harness.scheduler._requests, "end", side_effect=RuntimeError("oops")):
        harness.send(AbortReq(rids=[rid]))
        harness.turn()
    assert "AbortReq could not be handled" in caplog.text
    harness.run()
    harness.assert_as_expected()


def test_a_failing_step_ends_the_loop(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(overlap=False)
    harness.submit(prompt_of(5))
    with mock.patch.object(harness.runner, "fetch", side_effect=RuntimeError("device lost")), pytest.raises(RuntimeError):
        harness.turn(3)


# --- control requests


def test_a_control_handler_that_fails_answers_with_its_error(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5))
    with mock.patch.object(harness.scheduler, "internal_state", side_effect=KeyError("gone")):
        harness.control(GetInternalStateReq())
        harness.turn()
    with mock.patch.object(harness.scheduler, "internal_state", side_effect=ControlError("Not today.", 403)):
        harness.control(GetInternalStateReq())
        harness.turn()
    with mock.patch.object(harness.scheduler, "internal_state", return_value={"runner": object()}):
        harness.control(GetInternalStateReq())
        harness.turn()
    failed, refused, unsendable = [reply for reply in harness.transport.replies if isinstance(reply, ControlReply)]
    assert failed.error == "get_internal_state failed in the scheduler: KeyError: 'gone'" and failed.status_code == 500
    assert (refused.error, refused.status_code) == ("Not today.", 403)
    assert "cannot be sent" in unsendable.error
    harness.run()
    harness.assert_as_expected(rid)


def test_unknown_and_malformed_control_requests_are_answered(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.send(ControlRequest(request_id="1", name="dance"))
    harness.send(ControlRequest(request_id="2", name="pause_generation"))  # its body is nil
    harness.turn()
    unknown, malformed = harness.transport.replies
    assert isinstance(unknown, ControlReply) and isinstance(malformed, ControlReply)
    assert (unknown.request_id, unknown.status_code) == ("1", 404) and "'dance'" in unknown.error
    assert (malformed.request_id, malformed.status_code) == ("2", 400) and "pause_generation is wrong" in malformed.error


def test_a_step_that_fails_while_a_pause_waits_for_it_ends_the_loop_too(make_harness: Callable[..., Harness]) -> None:
    """After the pause has been answered with the error."""
    harness = make_harness()
    harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(3)
    harness.control(PauseGenerationReqInput(mode="in_place"))
    with mock.patch.object(harness.runner, "fetch", side_effect=RuntimeError("device lost")), pytest.raises(RuntimeError):
        harness.turn()
    assert "RuntimeError: device lost" in harness.control_replies()[0]
