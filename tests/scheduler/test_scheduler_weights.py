"""Other weights and released memory, with the fake runner: a request's tokens are of one set of weights, and it ends once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_contents import weights_of
from scheduler_harness import Harness, prompt_of, until_replied

from jaxserve.commands import CheckWeights, ReleaseMemory, ReplaceWeights, ResumeMemory
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.release_memory_occupation import (
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
)
from jaxserve.scheduler.control.resume_memory_occupation import ResumeMemoryOccupationReqInput, ResumeMemoryOccupationReqOutput
from jaxserve.scheduler.control.update_weight_version import UpdateWeightVersionReqInput
from jaxserve.scheduler.control.update_weights_from_disk import UpdateWeightFromDiskReqInput, UpdateWeightFromDiskReqOutput

both_loops = pytest.mark.parametrize("overlap", [True, False])
NEW = weights_of("new")
DONE = UpdateWeightFromDiskReqOutput(True, "The weights are those of new now.")


def update(harness: Harness, path: str = "new", **fields: Any) -> None:
    harness.control(UpdateWeightFromDiskReqInput(model_path=path, **fields))


def assert_tokens(harness: Harness, rid: str, weights: int) -> None:
    message, answer = harness.sent[rid], harness.answer(rid)
    expected = harness.runner.expected_tokens(
        message.input_ids.tolist(), message.sampling_params.max_new_tokens, stop_ids=(), weights=weights
    )
    assert answer.token_ids == expected, f"{rid}: {answer}"
    assert answer.finish is not None and answer.finish.type == "length"


@both_loops
@pytest.mark.parametrize("turns", range(7))
def test_each_request_has_its_tokens_from_one_set_of_weights(
    make_harness: Callable[..., Harness], turns: int, overlap: bool
) -> None:
    """Whatever a request is doing when the update comes; those that have not begun wait for the new weights."""
    harness = make_harness({"chunked_prefill_size": 16}, overlap=overlap, page_size=4, num_pages=128, max_rows=3)
    shared = prompt_of(12)
    early = [harness.submit(shared + prompt_of(n, n), 10, ignore_eos=True) for n in (30, 5, 9, 14)]
    harness.turn(turns)
    update(harness)
    harness.turn()
    late = [harness.submit(shared + prompt_of(n, n), 10, ignore_eos=True) for n in (30, 7)]
    assert until_replied(harness) == DONE
    ended = {rid for rid, answer in harness.transport.answers.items() if answer.finish is not None}
    harness.run()
    for rid in (*early, *late):
        assert_tokens(harness, rid, 0 if rid in ended else NEW)
    assert not ended & set(late)
    # A prefix that the old weights computed is not found any more: the fake runner would say so.
    again = harness.submit(harness.sent[early[0]].input_ids.tolist(), 10, ignore_eos=True)
    harness.run()
    assert_tokens(harness, again, NEW)
    assert harness.runner.commands == [CheckWeights("new", "auto"), ReplaceWeights("new", "auto")]


@both_loops
def test_retracted_requests_end_with_the_weights_they_began_with(make_harness: Callable[..., Harness], overlap: bool) -> None:
    """Memory is too short for all: some give way while the update waits, and are admitted again before it."""
    harness = make_harness({"schedule_conservativeness": 0.0}, overlap=overlap, eos_token_ids=(1000,), num_pages=64)
    rids = []
    for seed in range(4):
        rids.append(harness.submit(prompt_of(8, seed), 40))  # its end is not known: no memory is kept for it
        harness.turn(2)
    update(harness)
    late = harness.submit(prompt_of(5), 5, ignore_eos=True)
    assert until_replied(harness) == DONE
    ended = {rid for rid, answer in harness.transport.answers.items() if answer.finish is not None}
    harness.run()
    assert any(harness.answer(rid).times.num_retractions for rid in ended)  # type: ignore[union-attr]
    for rid in rids:
        assert_tokens(harness, rid, 0 if rid in ended else NEW)
    assert_tokens(harness, late, NEW)


@both_loops
def test_abort_all_requests_ends_them_first(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap, max_rows=2)
    rids = [harness.submit(prompt_of(5, n), 100, ignore_eos=True) for n in range(4)]
    harness.turn(4)
    update(harness, abort_all_requests=True, weight_version="v2")
    assert until_replied(harness) == DONE
    for rid in rids:
        finish = harness.answer(rid).finish
        assert finish is not None and finish.type == "abort"
    late = harness.submit(prompt_of(5), 5, ignore_eos=True)
    harness.run()
    assert_tokens(harness, late, NEW)
    assert harness.scheduler.args.weight_version == "v2"


@pytest.mark.parametrize(("path", "num_commands"), [("bad", 1), ("broken", 2)])
def test_an_update_that_fails_changes_nothing(make_harness: Callable[..., Harness], path: str, num_commands: int) -> None:
    """What the check finds keeps nobody waiting and ends nobody."""
    harness = make_harness()
    running = harness.submit(prompt_of(5), 30, ignore_eos=True)
    harness.turn(3)
    update(harness, path, abort_all_requests=path == "bad", weight_version="v2")
    reply = until_replied(harness)
    assert reply == UpdateWeightFromDiskReqOutput(False, f"{path} cannot be loaded.")
    assert len(harness.runner.commands) == num_commands
    assert (running in harness.transport.answers) == (path == "broken")  # it had to end first
    late = harness.submit(prompt_of(6), 5, ignore_eos=True)
    harness.run()
    assert_tokens(harness, running, 0)
    assert_tokens(harness, late, 0)
    assert harness.scheduler.args.weight_version == "default"
    update(harness)
    assert until_replied(harness, 2) == DONE


def test_one_command_at_a_time(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    running = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(2)
    update(harness)
    harness.turn(2)
    update(harness, "other")
    harness.control(ReleaseMemoryOccupationReqInput())
    harness.turn()
    wait = "must wait: update_weights_from_disk is still under way."
    assert harness.control_replies() == [
        UpdateWeightFromDiskReqOutput(False, f"update_weights_from_disk {wait}"),
        f"release_memory_occupation {wait}",
    ]
    assert until_replied(harness, 3) == DONE
    harness.run()
    assert_tokens(harness, running, 0)


def test_requests_and_questions_are_taken_while_weights_are_loaded(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"max_queued_requests": 2})
    harness.runner.command_delay_s = 0.05
    update(harness)
    while len(harness.runner.commands) < 2:  # the first one checks
        harness.turn()
    rids = [harness.submit(prompt_of(5, n), 5, ignore_eos=True) for n in range(4)]
    harness.control(GetInternalStateReq())
    harness.turn()
    (state,) = [reply.internal_state for reply in harness.control_replies()]
    assert state["num_waiting_reqs"] == 4
    harness.turn()
    harness.abort(rids[0], exact=True)
    assert until_replied(harness, 2) == DONE
    harness.run()
    kinds = [harness.answer(rid).finish.type for rid in rids]  # type: ignore[union-attr]
    assert kinds == ["abort", "length", "abort", "abort"]  # one by its client, two for whom the queue was full
    assert_tokens(harness, rids[1], NEW)


@both_loops
def test_an_update_during_a_pause(make_harness: Callable[..., Harness], overlap: bool) -> None:
    """Paused in place is refused; retracted requests go on with the new weights, as trainers want it."""
    harness = make_harness(overlap=overlap)
    rids = [harness.submit(prompt_of(5, n), 20, ignore_eos=True, stream=True) for n in range(2)]
    harness.turn(5)
    harness.control(PauseGenerationReqInput(mode="in_place"))
    update(harness)
    reply = until_replied(harness, 2)
    assert not reply.success and "2 requests are paused in place" in reply.message
    harness.control(PauseGenerationReqInput(mode="retract"))
    update(harness)
    reply = until_replied(harness, 4)
    assert (reply.success, reply.num_paused_requests) == (True, 2)
    before = {rid: list(harness.answer(rid).token_ids) for rid in rids}
    harness.control(ContinueGenerationReqInput())
    harness.run()
    for rid in rids:
        tokens = harness.answer(rid).token_ids
        assert len(tokens) == 20 and tokens[: len(before[rid])] == before[rid]
    late = harness.submit(prompt_of(6), 5, ignore_eos=True)
    harness.run()
    assert_tokens(harness, late, NEW)


@both_loops
def test_memory_is_released_only_while_nothing_runs(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    running = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(3)
    harness.control(ReleaseMemoryOccupationReqInput())
    assert "1 requests are running and 0 are waiting" in until_replied(harness)
    harness.run()
    assert_tokens(harness, running, 0)
    harness.control(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    assert until_replied(harness, 2) == ReleaseMemoryOccupationReqOutput(("kv_cache",))
    refused = harness.submit(prompt_of(5), 5)
    harness.turn(3)
    finish = harness.answer(refused).finish
    assert finish is not None and finish.status_code == 503
    assert finish.message == "The server's memory is released (kv_cache); /resume_memory_occupation takes it again."
    harness.control(ReleaseMemoryOccupationReqInput())
    assert until_replied(harness, 3) == ReleaseMemoryOccupationReqOutput(("kv_cache", "weights"))
    harness.control(ResumeMemoryOccupationReqInput())
    assert until_replied(harness, 4) == ResumeMemoryOccupationReqOutput(())
    again = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.run()
    assert_tokens(harness, again, 0)
    assert harness.answer(again).cached_tokens == 0
    assert harness.runner.commands == [
        ReleaseMemory(("kv_cache",)), ReleaseMemory(("weights",)), ResumeMemory(("kv_cache", "weights")),
    ]  # fmt: skip


@both_loops
def test_resuming_what_is_not_released_is_refused_while_requests_run(
    make_harness: Callable[..., Harness], overlap: bool
) -> None:
    harness = make_harness(overlap=overlap)
    running = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(3)
    harness.control(ResumeMemoryOccupationReqInput(tags=["kv_cache", "weights"]))
    assert until_replied(harness) == "kv_cache is not released."
    harness.run()
    assert_tokens(harness, running, 0)


def test_memory_in_the_wrong_state(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.control(ResumeMemoryOccupationReqInput())
    assert until_replied(harness) == "No memory is released."
    harness.control(ResumeMemoryOccupationReqInput(tags=["weights"]))
    assert "is not released" in until_replied(harness, 2)
    harness.control(ReleaseMemoryOccupationReqInput())
    until_replied(harness, 3)
    harness.control(ReleaseMemoryOccupationReqInput())
    assert until_replied(harness, 4) == "All memory is released already."
    harness.control(ResumeMemoryOccupationReqInput())
    until_replied(harness, 5)
    rid = harness.submit(prompt_of(5), 5, ignore_eos=True)
    harness.run()
    assert_tokens(harness, rid, 0)


def test_a_pause_keeps_requests_over_a_release_and_an_update(make_harness: Callable[..., Harness]) -> None:
    """The order of a trainer that shares the devices: pause, release, resume the weights by an update, resume the rest."""
    harness = make_harness()
    rids = [harness.submit(prompt_of(5, n), 20, ignore_eos=True) for n in range(3)]
    harness.turn(4)
    harness.control(PauseGenerationReqInput(mode="retract"))
    harness.control(ReleaseMemoryOccupationReqInput())
    assert until_replied(harness, 2) == ReleaseMemoryOccupationReqOutput(("kv_cache", "weights"))
    update(harness)
    assert until_replied(harness, 3).success
    harness.control(ContinueGenerationReqInput())
    num_steps = len(harness.steps)
    harness.turn(5)
    assert len(harness.steps) == num_steps  # the KV cache is still released
    assert harness.scheduler.wait_s != 0, "the loop would spin"
    harness.control(ResumeMemoryOccupationReqInput())
    assert until_replied(harness, 5) == ResumeMemoryOccupationReqOutput(())
    harness.run()
    for rid in rids:
        assert len(harness.answer(rid).token_ids) == 20


@both_loops
@pytest.mark.parametrize("aborts", [True, False])
def test_another_version_of_the_same_weights(make_harness: Callable[..., Harness], overlap: bool, aborts: bool) -> None:
    harness = make_harness(overlap=overlap)
    early = harness.submit(prompt_of(9), 20, ignore_eos=True)
    harness.turn(4)
    harness.control(UpdateWeightVersionReqInput(new_version="v2", abort_all_requests=aborts))
    harness.turn()
    reply = harness.control_replies()[-1]
    assert (reply.success, reply.new_version) == (True, "v2")
    late = harness.submit(prompt_of(7, 2), 5, ignore_eos=True)
    harness.run()
    finish = harness.answer(early).finish
    assert finish is not None and finish.type == ("abort" if aborts else "length")
    assert_tokens(harness, late, 0)
    assert harness.runner.commands == []
