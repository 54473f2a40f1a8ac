"""Prompts given as embeddings: the tokens are those of the ids they stand for, whatever happens on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_answers import embeddings_of, expected_hidden
from scheduler_harness import Harness, LetterDecoder, prompt_of

from jaxserve.messages import PROMPT_TAIL_LEN
from jaxserve.runner import NO_TOKEN_ID

NO_EOS = (1000,)
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options and the runner's spec
    "pages of one": ({}, {}),
    "chunks": ({"chunked_prefill_size": 16}, {"page_size": 4, "num_pages": 128}),
    "mixed": ({"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {"page_size": 4, "num_pages": 128}),
    "retraction": ({"schedule_conservativeness": 0.0, "chunked_prefill_size": 16}, {"num_pages": 150}),
    "drafts, retraction": ({"schedule_conservativeness": 0.0}, {"num_draft_tokens": 3, "num_pages": 150}),
    "plain loop": ({"disable_overlap_schedule": True, "chunked_prefill_size": 8}, {"page_size": 4, "num_pages": 128}),
    "no radix": ({"disable_radix_cache": True, "chunked_prefill_size": 16}, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_the_ids(make_harness: Callable[..., Harness], setting: str) -> None:
    options, spec = SETTINGS[setting]
    overlap = not options.get("disable_overlap_schedule")
    harness = make_harness(options, overlap=overlap, eos_token_ids=NO_EOS, max_step_tokens=64, **spec)
    rng = random.Random(3)
    for i in range(40):
        prompt = prompt_of(rng.choice([0, 20, 40]), 1) + prompt_of(rng.randint(1, 15), 100 + i)
        harness.submit(
            prompt,
            rng.choice([1, 6, 30]),
            stream=rng.random() < 0.5,
            embeds=rng.random() < 0.6,
            return_logprob=rng.random() < 0.3,
            logprob_start_len=rng.choice([-1, len(prompt)]),
            temperature=rng.choice([0.0, 1.0]),
            sampling_seed=i,
            presence_penalty=rng.choice([0.0, 1.0]),
        )
        harness.turn(rng.randint(0, 3))
    harness.run()
    harness.assert_as_expected()
    retractions = harness.scheduler.internal_state()["num_retractions"]
    assert retractions > 0 if "retraction" in setting else not retractions
    assert any(step.embeds for step in harness.steps)


def test_nobody_shares_pages_but_twins(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(page_size=4, eos_token_ids=NO_EOS)
    prompt = prompt_of(41)
    other = embeddings_of(prompt)
    other[40, 0] += 1
    for rid, embeds in (("ids", False), ("embeds", True), ("other", other), ("twin", True), ("ids again", False)):
        harness.submit(prompt, 1, rid=rid, embeds=embeds)
        harness.run()
    cached = {rid: harness.answer(rid).cached_tokens for rid in harness.sent}
    assert cached == {"ids": 0, "embeds": 0, "other": 0, "twin": 40, "ids again": 40}
    assert harness.answer("other").token_ids == harness.runner.expected_tokens([*prompt[:40], prompt[40] + 1], 1)
    harness.assert_as_expected("ids", "embeds", "twin", "ids again")


def test_copies_of_one_step_wait_for_the_first(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(eos_token_ids=NO_EOS)
    for rid in "abc":
        harness.submit(prompt_of(40), 1, rid=rid, embeds=True)
    harness.submit(prompt_of(40, 9), 1, rid="other", embeds=True)
    harness.run()
    assert harness.prefill_lens() == [[40, 40], [1, 1]]
    harness.assert_as_expected()


def test_an_abort_between_chunks(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": 16}, eos_token_ids=NO_EOS)
    harness.submit(prompt_of(90), 5, rid="gone", embeds=True)
    harness.turn(2)
    harness.abort("gone", exact=True)
    harness.submit(prompt_of(90), 5, rid="stays", embeds=True)
    harness.run()
    assert harness.answer("gone").finish.type == "abort"  # type: ignore[union-attr]
    harness.assert_as_expected("stays")


def test_stops_and_hidden_states(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({}, text_decoder=LetterDecoder(), eos_token_ids=NO_EOS, returns_hidden_states=True)
    prompt = prompt_of(20)
    tokens = harness.runner.expected_tokens(prompt, 8, stop_ids=())
    stop = LetterDecoder().decode([tokens[4]])
    harness.submit(prompt, 8, rid="stop", embeds=True, stop=[stop])
    harness.submit(prompt, 8, rid="pattern", embeds=True, stop_regex=[f"[{stop}]"])
    harness.submit(prompt, 8, rid="states", embeds=True, return_hidden_states=True)
    harness.run()
    first = next(at for at, token in enumerate(tokens) if LetterDecoder().decode([token]) == stop)
    assert harness.answer("stop").token_ids == harness.answer("pattern").token_ids == tokens[: first + 1]
    (states,) = [states.prompt for states in harness.answer("states").hidden_states if states.prompt is not None]
    assert states.tolist() == [expected_hidden(at, token) for at, token in enumerate(prompt)]


def test_the_detokenizer_gets_ids_that_it_knows(make_harness: Callable[..., Harness]) -> None:
    """A prompt without ids has no end to go on from; who tokenizes may name one."""
    harness = make_harness(eos_token_ids=NO_EOS)
    harness.submit(prompt_of(9), 1, rid="ids")
    harness.submit(prompt_of(9), 1, rid="embeds", embeds=True)
    message = harness.transport.inbox[-1]
    harness.transport.inbox[-1] = msgspec.structs.replace(message, prompt_tail=[17])
    harness.run()
    tails = {rid: harness.answer(rid).prompt_tail for rid in harness.sent}
    assert tails == {"ids": prompt_of(9)[-PROMPT_TAIL_LEN:], "embeds": [17]}


@pytest.mark.parametrize(
    ("shape", "ids"), [((3, 2), [NO_TOKEN_ID] * 4), ((4, 3), [NO_TOKEN_ID] * 4), ((4,), [NO_TOKEN_ID] * 4), ((4, 2), [1] * 4)]
)
def test_what_does_not_fit_the_model_is_refused(
    make_harness: Callable[..., Harness], shape: tuple[int, ...], ids: list[int]
) -> None:
    harness = make_harness(eos_token_ids=NO_EOS)
    harness.submit(prompt_of(4), 1, embeds=True)
    message = harness.transport.inbox[-1]
    wrong = {"input_ids": np.array(ids, np.int32), "input_embeds": np.zeros(shape, np.float32)}
    harness.transport.inbox[-1] = msgspec.structs.replace(message, **wrong)
    harness.run()
    finish = harness.answer("r0").finish
    assert finish is not None and finish.status_code == 400 and "input_embeds must be 4 x 2" in (finish.message or "")
