"""Logprobs of prompts and of named tokens, hidden states and experts: each at its place, whatever chunks, the cache, mixed
steps, drafts and retractions do in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_answers import expected_experts, expected_hidden, expected_score
from scheduler_harness import Answer, Harness, prompt_of

from jaxserve.messages import TokenizedGenerateReqInput
from jaxserve.types import FinishReason

NO_EOS = (1000,)
RETURNS: dict[str, Any] = {"returns_hidden_states": True, "experts_shape": (2, 3)}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options and the runner's spec
    "pages of one": ({}, {}),
    "chunks": ({"chunked_prefill_size": 16}, {"page_size": 4, "num_pages": 128}),
    "mixed": ({"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {"page_size": 4, "num_pages": 128}),
    "retraction": ({"schedule_conservativeness": 0.0}, {"num_pages": 150}),
    "drafts": ({"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {"num_draft_tokens": 4}),
    "drafts, retraction": ({"schedule_conservativeness": 0.0}, {"num_draft_tokens": 3, "num_pages": 150}),
    "plain loop": ({"disable_overlap_schedule": True, "chunked_prefill_size": 8}, {"page_size": 4, "num_pages": 128}),
    "no radix": ({"disable_radix_cache": True, "chunked_prefill_size": 16}, {}),
}


def check(message: TokenizedGenerateReqInput, answer: Answer) -> None:
    """Against what the fake runner says of each place."""
    prompt, ids = message.input_ids.tolist(), message.token_ids_logprob or []
    sequence, start = prompt + answer.token_ids, message.logprob_start_len
    assert answer.finish is not None and answer.finish.type == "length", answer.finish
    if message.return_logprob and start >= 0:
        found = answer.input_logprobs
        assert found is not None and found.token_ids.tolist() == prompt[start:]
        places = range(start, len(prompt) - 1)
        assert found.logprobs.logprobs.tolist() == [expected_score(at, prompt[at], prompt[at + 1]) for at in places]
        if message.top_logprobs_num:
            assert found.logprobs.top_ids is not None and found.logprobs.top_logprobs is not None
            assert found.logprobs.top_ids.shape == (len(places), message.top_logprobs_num)
            assert [row[0] for row in found.logprobs.top_ids.tolist()] == [prompt[at] for at in places]
            expected = [expected_score(at, prompt[at], prompt[at]) for at in places]
            assert [row[0] for row in found.logprobs.top_logprobs.tolist()] == expected
        if ids:
            assert found.logprobs.id_logprobs is not None
            expected_ids = [[expected_score(at, prompt[at], token) for token in ids] for at in places]
            assert found.logprobs.id_logprobs.tolist() == expected_ids
    else:
        assert answer.input_logprobs is None
    if message.return_logprob and ids:
        parts = [part.id_logprobs for part in answer.logprobs if part.id_logprobs is not None]
        places = range(len(prompt) - 1, len(sequence) - 1)
        expected_ids = [[expected_score(at, sequence[at], token) for token in ids] for at in places]
        assert np.concatenate(parts).tolist() == expected_ids
    if message.return_hidden_states:
        first = len(prompt) - 1 if message.return_hidden_states == "last" else 0
        prompts = [states.prompt for states in answer.hidden_states if states.prompt is not None]
        outputs = [states.outputs for states in answer.hidden_states if states.outputs is not None]
        found_places = np.concatenate(prompts + outputs).tolist()
        expected_places = [expected_hidden(at, sequence[at]) for at in range(first, len(sequence) - 1)]
        if message.return_hidden_states == "last":
            assert found_places[-1] == expected_places[-1]
        else:
            assert len(prompts) == 1 and found_places == expected_places
    else:
        assert not answer.hidden_states
    if message.return_routed_experts:
        places = range(message.routed_experts_start_len, len(sequence) - 1)
        found_experts = np.concatenate([np.zeros((0, 2, 3), np.int32), *answer.experts])
        assert found_experts.tolist() == [expected_experts(at, sequence[at]) for at in places]
    else:
        assert not answer.experts


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_answer_is_about_its_place(make_harness: Callable[..., Harness], setting: str) -> None:
    options, spec = SETTINGS[setting]
    overlap = not options.get("disable_overlap_schedule")
    harness = make_harness(options, overlap=overlap, eos_token_ids=NO_EOS, max_step_tokens=64, **RETURNS, **spec)
    rng = random.Random(7)
    for i in range(40):
        prompt = prompt_of(rng.choice([0, 20, 40]), 1) + prompt_of(rng.randint(1, 15), 100 + i)
        harness.submit(
            prompt,
            rng.choice([1, 6, 30]),
            stream=rng.random() < 0.5,
            return_logprob=rng.random() < 0.8,
            top_logprobs_num=rng.choice([0, 2]),
            logprob_start_len=rng.choice([-1, 0, rng.randint(0, len(prompt))]),
            token_ids_logprob=rng.choice([None, [3], [1, 50, 99]]),
            return_hidden_states=rng.choice([False, False, True, "last"]),
            experts_from=rng.choice([None, None, 0, rng.randint(0, len(prompt))]),
        )
        harness.turn(rng.randint(0, 3))
    harness.run()
    harness.assert_as_expected()
    for rid, message in harness.sent.items():
        check(message, harness.answer(rid))
    retractions = harness.scheduler.internal_state()["num_retractions"]
    assert retractions > 0 if "retraction" in setting else not retractions


def test_what_is_asked_about_is_computed_again(make_harness: Callable[..., Harness]) -> None:
    """And no more than that: the cache serves what comes before."""
    harness = make_harness(page_size=4, eos_token_ids=NO_EOS)
    prompt = prompt_of(41)
    harness.submit(prompt, 1)
    harness.run()
    starts = {"none": -1, "end": 41, "all": 0, "late": 30, "page": 32}
    for rid, start in starts.items():
        harness.submit(prompt, 1, rid=rid, return_logprob=True, logprob_start_len=start)
        harness.run()
        check(harness.sent[rid], harness.answer(rid))
    assert {rid: harness.answer(rid).cached_tokens for rid in starts} == {
        "none": 40, "end": 40, "all": 0, "late": 28, "page": 32,
    }  # fmt: skip


def test_experts_are_computed_again_from_their_start_on(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(page_size=4, eos_token_ids=NO_EOS, **RETURNS)
    prompt = prompt_of(41)
    for rid, start in {"first": 0, "all": 0, "late": 30, "end": 41}.items():
        harness.submit(prompt, 3, rid=rid, experts_from=start)
        harness.run()
        check(harness.sent[rid], harness.answer(rid))
    assert [harness.answer(rid).cached_tokens for rid in ("first", "all", "late", "end")] == [0, 0, 28, 40]


def test_copies_do_not_wait_for_a_prefix_they_cannot_use(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(eos_token_ids=NO_EOS)
    for rid in "abc":
        harness.submit(prompt_of(40), 1, rid=rid, return_logprob=True, logprob_start_len=0)
    harness.run()
    assert harness.prefill_lens() == [[40, 40, 40]]
    for rid in "abc":
        check(harness.sent[rid], harness.answer(rid))


def test_no_tokens_wanted(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, eos_token_ids=NO_EOS, **RETURNS)
    asked: dict[str, Any] = {"token_ids_logprob": [5], "return_hidden_states": True, "experts_from": 3}
    rid = harness.submit(prompt_of(40), 0, return_logprob=True, logprob_start_len=3, **asked)
    harness.run()
    answer = harness.answer(rid)
    assert answer.finish == FinishReason.length_limit(0) and answer.input_logprobs is not None
    assert answer.input_logprobs.logprobs.logprobs.shape == (36,)
    (states,) = answer.hidden_states
    assert states.prompt is not None and len(states.prompt) == 40 and states.outputs is None
    (experts,) = answer.experts
    assert experts.shape == (37, 2, 3), "the prompt's last token was computed, too"


def test_an_abort_between_chunks_sends_what_there_is(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, eos_token_ids=NO_EOS, returns_hidden_states=True)
    rid = harness.submit(prompt_of(100), 5, return_logprob=True, logprob_start_len=0, return_hidden_states=True)
    other = harness.submit(prompt_of(30, 5), 5, return_logprob=True, logprob_start_len=0)
    harness.turn(3)
    harness.abort(rid, exact=True)
    harness.run()
    answer = harness.answer(rid)
    assert answer.finish is not None and answer.finish.type == "abort"
    assert answer.input_logprobs is None or len(answer.input_logprobs.logprobs.logprobs) < 99
    assert not answer.hidden_states
    check(harness.sent[other], harness.answer(other))


def test_what_cannot_be_answered_is_refused(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(eos_token_ids=NO_EOS)
    rids = [
        harness.submit(prompt_of(5), 1, return_logprob=True, logprob_start_len=6),
        harness.submit(prompt_of(5), 1, return_hidden_states=True),
        harness.submit(prompt_of(5), 1, experts_from=0),
    ]
    harness.run()
    messages = [finish.message for rid in rids if (finish := harness.answer(rid).finish)]
    assert messages == [
        "logprob_start_len may be at most the prompt's 5 tokens, got 6.",
        "return_hidden_states needs a server that runs with --enable-return-hidden-states.",
        "return_routed_experts needs a server that runs with --enable-return-routed-experts.",
    ]
    harness = make_harness(eos_token_ids=NO_EOS, **RETURNS)
    rid = harness.submit(prompt_of(5), 1, experts_from=6)
    harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None and finish.message == "routed_experts_start_len may be at most the prompt's 5 tokens, got 6."
