"""Weights that come in requests, with the fake runner: alone, and between begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_contents import weights_of
from scheduler_harness import Harness, prompt_of, until_replied

from jaxserve.commands import CheckTensors, ForgetTensors, OfferedTensor, PullTensors, ReadTensors, ReplaceTensors
from jaxserve.scheduler.control.begin_weight_update import BeginWeightUpdateReqInput
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.end_weight_update import EndWeightUpdateReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.update_weights_from_distributed import UpdateWeightsFromDistributedReqInput
from jaxserve.scheduler.control.update_weights_from_tensor import TensorUpdateOutput, UpdateWeightsFromTensorReqInput

both_loops = pytest.mark.parametrize("overlap", [True, False])


def bring(harness: Harness, *files: bytes, **options: Any) -> None:
    harness.control(UpdateWeightsFromTensorReqInput(serialized_named_tensors=[*files], **options))


def tokens_of(harness: Harness) -> list[int]:
    rid = harness.submit(prompt_of(5), 6, ignore_eos=True)
    harness.run()
    return list(harness.answer(rid).token_ids)


def tokens_with(harness: Harness, weights: str) -> list[int]:
    return list(harness.runner.expected_tokens(prompt_of(5), 6, stop_ids=(), weights=weights_of(weights)))


@both_loops
def test_running_requests_end_with_the_old_weights(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    early = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(4)
    bring(harness, b"1", b"2", weight_version="v1")
    assert until_replied(harness) == TensorUpdateOutput(True, "The weights are replaced.", True, True, "v1")
    harness.run()
    assert set(harness.answer(early).versions) == {"default"}
    assert tokens_of(harness) == tokens_with(harness, "12")
    read, check, replace, forget = harness.runner.commands
    assert read == ReadTensors((b"1", b"2"))
    assert (check, replace, forget) == (CheckTensors(None, True), ReplaceTensors(None, True), ForgetTensors())


@both_loops
def test_with_its_cache_kept_a_request_goes_on_at_once(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    harness.runner.reads_old_kv = True
    rid = harness.submit(prompt_of(6), 20, ignore_eos=True)
    harness.turn(6)
    bring(harness, b"1", flush_cache=False, weight_version="v1")
    reply = until_replied(harness)
    assert reply.is_replaced and not reply.is_flushed
    harness.run()
    versions = harness.answer(rid).versions
    assert versions == sorted(versions) and set(versions) == {"default", "v1"}


@both_loops
def test_between_begin_and_end_nothing_changes(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness(overlap=overlap)
    harness.control(BeginWeightUpdateReqInput())
    assert until_replied(harness).success
    bring(harness, b"1", flush_cache=False, weight_version="v1")
    assert not until_replied(harness, 2).is_replaced
    before = tokens_of(harness)
    bring(harness, b"bad")
    assert until_replied(harness, 3) == TensorUpdateOutput(False, "It cannot be read.")
    bring(harness, b"2", flush_cache=False)
    assert until_replied(harness, 4).success
    assert before == tokens_of(harness) != tokens_with(harness, "12")
    harness.runner.reads_old_kv = True
    harness.control(EndWeightUpdateReqInput())
    assert until_replied(harness, 5) == TensorUpdateOutput(True, "The weights are replaced.", True, False, "v1")
    assert harness.scheduler.args.weight_version == "v1"
    harness.scheduler.flush_cache()
    assert tokens_of(harness) == tokens_with(harness, "12")
    bring(harness, b"3")  # by itself again
    assert until_replied(harness, 6).is_replaced
    assert tokens_of(harness) == tokens_with(harness, "3")


def test_an_update_that_nobody_ended_is_given_up(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    for number, file in enumerate((b"1", b"2")):
        harness.control(BeginWeightUpdateReqInput())
        bring(harness, file)
        assert until_replied(harness, 2 + 2 * number).success
    harness.control(EndWeightUpdateReqInput())
    assert until_replied(harness, 5).is_replaced
    assert tokens_of(harness) == tokens_with(harness, "2")


@both_loops
def test_what_others_offer_is_fetched(make_harness: Callable[..., Harness], overlap: bool) -> None:
    """Alone, and beside tensors that requests bring."""
    harness = make_harness(overlap=overlap)

    def fetch(uuid: int, **options: Any) -> None:
        tensors = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], []]}
        harness.control(UpdateWeightsFromDistributedReqInput(**tensors, address="trainer:1", uuid=uuid, **options))

    fetch(7, timeout_s=5, weight_version="v1")
    assert until_replied(harness) == TensorUpdateOutput(True, "The weights are replaced.", True, True, "v1")
    assert tokens_of(harness) == tokens_with(harness, "7")
    described = (OfferedTensor("a", "float32", (2, 3)), OfferedTensor("b", "bfloat16", ()))
    assert harness.runner.commands[0] == PullTensors("trainer:1", 7, described, 5)
    harness.control(BeginWeightUpdateReqInput())
    fetch(8)
    assert not until_replied(harness, 3).is_replaced
    bring(harness, b"9")
    assert not until_replied(harness, 4).is_replaced
    harness.control(EndWeightUpdateReqInput())
    assert until_replied(harness, 5).is_replaced
    assert tokens_of(harness) == tokens_with(harness, "89")


def test_what_is_refused_changes_nothing_and_is_not_kept(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(4)
    bring(harness, b"wrong", abort_all_requests=True, weight_version="v1")
    assert until_replied(harness) == TensorUpdateOutput(False, "None is wrong.")
    harness.control(BeginWeightUpdateReqInput())
    bring(harness, b"wrong", weight_version="v1")
    until_replied(harness, 3)
    harness.control(EndWeightUpdateReqInput())
    assert until_replied(harness, 4) == TensorUpdateOutput(False, "None is wrong.")
    harness.control(PauseGenerationReqInput(mode="in_place"))
    bring(harness, b"1")
    refused = until_replied(harness, 6)
    assert not refused.success and "paused in place" in refused.message
    harness.control(ContinueGenerationReqInput())
    harness.run()
    assert set(harness.answer(rid).versions) == {"default"} and len(harness.answer(rid).token_ids) == 20
    harness.control(EndWeightUpdateReqInput())
    assert until_replied(harness, 8) == "No update of weights has begun: /begin_weight_update must come first."
    bring(harness, b"2")
    assert until_replied(harness, 9).is_replaced
    assert tokens_of(harness) == tokens_with(harness, "2")


def test_one_update_waits_for_the_other(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(4)
    bring(harness, b"1")
    harness.turn(3)
    bring(harness, b"2")
    assert until_replied(harness) == TensorUpdateOutput(
        False, "update_weights_from_tensor must wait: update_weights_from_tensor is still under way."
    )
    assert until_replied(harness, 2).is_replaced
    harness.run()
    assert tokens_of(harness) == tokens_with(harness, "1")


def test_all_must_come_where_there_are_no_weights(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.scheduler.commands._released.add("weights")
    bring(harness, b"1")
    assert until_replied(harness).is_replaced
    assert ReplaceTensors(None, partial=False) in harness.runner.commands
