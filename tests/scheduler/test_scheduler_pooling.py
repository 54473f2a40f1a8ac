"""Texts of which vectors are wanted: each request gets that of its own tokens, once, with its end, whatever chunks, the prefix
cache, requests that generate and retractions do in between.

The fake runner's vectors say which tokens they were made of, and it checks what it is asked (`fake_vectors`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fake_answers import embeddings_of
from fake_vectors import fake_vectors
from scheduler_harness import Harness, prompt_of
from test_scheduler_adapters import load, until_idle

from jaxserve.runner import Vectors
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.types import FinishReason, ForwardMode

MakeHarness = Callable[..., Harness]
NO_EOS = (1000,)
KINDS: dict[str, Vectors] = {
    "last": fake_vectors(),
    "whole": fake_vectors(needs_whole=True, gives="scores"),
    "tokens": fake_vectors(needs_whole=True, of_tokens=True, gives="token_scores"),
}
kinds = pytest.mark.parametrize("kind", KINDS)
both_loops = pytest.mark.parametrize("overlap", [True, False])
CHUNKED: dict[str, Any] = {"chunked_prefill_size": 16}
PAGES: dict[str, Any] = {"page_size": 4, "num_pages": 128, "eos_token_ids": NO_EOS}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options and the runner's spec
    "pages of one": ({}, {}),
    "chunks": (CHUNKED, {"page_size": 4, "num_pages": 128}),
    "mixed": (CHUNKED | {"enable_mixed_chunk": True}, {"page_size": 4, "num_pages": 128}),
    "retraction": ({"schedule_conservativeness": 0.0, "enable_mixed_chunk": True}, {"num_pages": 150}),
    "drafts": (CHUNKED | {"enable_mixed_chunk": True}, {"num_draft_tokens": 4}),
    "no radix": ({"disable_radix_cache": True, "chunked_prefill_size": 16}, {}),
    "shards": (CHUNKED, {"num_shards": 2, "page_size": 4, "num_pages": 128}),
    "stages": (CHUNKED, {"num_stages": 3}),
    "few rows": (CHUNKED, {"max_rows": 2}),
}


@kinds
@both_loops
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_vector_is_that_of_its_text(make_harness: MakeHarness, setting: str, overlap: bool, kind: str) -> None:
    options, spec = SETTINGS[setting]
    values = {"eos_token_ids": NO_EOS, "max_step_tokens": 64, "vectors": KINDS[kind], **spec}
    harness = make_harness(options, overlap=overlap, **values)
    rng = random.Random(5)
    for i in range(60):
        prompt = prompt_of(rng.choice([0, 20, 40]), 1) + prompt_of(rng.randint(1, 30), 100 + i)
        if rng.random() < 0.6:
            harness.pool(prompt, stream=rng.random() < 0.5)
        else:
            harness.submit(prompt, rng.choice([0, 1, 6, 30]), stream=rng.random() < 0.5)
        harness.turn(rng.randint(0, 2))
    harness.run()
    harness.assert_as_expected()
    pooling = [rid for rid, message in harness.sent.items() if message.pools]
    for rid in pooling:
        answer = harness.answer(rid)
        assert answer.finish == FinishReason.length_limit(0)
        assert answer.message_sizes == [0] and answer.token_ids == [] and answer.prompt_tail == []
    assert len(pooling) > 20
    assert bool(harness.runner.vectors.num_resumed) == (kind != "last"), "the test is void"
    if setting == "retraction":
        assert harness.scheduler.internal_state()["num_retractions"] > 0
    if "mixed" in setting or setting == "drafts":
        assert any(step.mode is ForwardMode.MIXED and step.pool_query is not None for step in harness.steps)
    if setting == "shards":
        rows = np.concatenate([step.pool_query.rows for step in harness.steps if step.pool_query is not None])
        assert set((rows // harness.runner.spec.rows_per_shard).tolist()) == {0, 1}


@kinds
def test_texts_share_a_step(make_harness: MakeHarness, kind: str) -> None:
    harness = make_harness(eos_token_ids=NO_EOS, vectors=KINDS[kind])
    for length in (1, 7, 3):
        harness.pool(prompt_of(length))
    harness.submit(prompt_of(5, 5), 2)
    harness.pool(prompt_of(2))
    harness.run()
    harness.assert_as_expected()
    query = harness.steps[0].pool_query
    assert query is not None
    if kind == "last":
        assert query.first_slots.tolist() == [0, 7, 10, 17] and query.counts.tolist() == [1, 1, 1, 1]
        assert query.starts.tolist() == [0, 6, 2, 1]
    else:
        assert query.first_slots.tolist() == [0, 1, 8, 16] and query.counts.tolist() == [1, 7, 3, 2]
        assert query.starts.tolist() == [0, 0, 0, 0]
    assert query.ends.all()
    assert all(step.pool_query is None for step in harness.steps[1:])


@kinds
def test_only_what_a_vector_needs_is_computed_again(make_harness: MakeHarness, kind: str) -> None:
    """What was computed for one is there for those that generate."""
    harness = make_harness(CHUNKED, vectors=KINDS[kind], **PAGES)
    prompt = prompt_of(41)
    for rid in ("first", "second"):
        harness.pool(prompt, rid=rid)
        harness.run()
    harness.submit(prompt, 3, rid="text")
    harness.run()
    harness.assert_as_expected()
    assert harness.answer("second").cached_tokens == (40 if kind == "last" else 0)
    assert harness.answer("text").cached_tokens == 40


@kinds
def test_copies_of_a_text(make_harness: MakeHarness, kind: str) -> None:
    """They wait for each other only if they can use what the first computes."""
    harness = make_harness(vectors=KINDS[kind], eos_token_ids=NO_EOS)
    for rid in "abc":
        harness.pool(prompt_of(40), rid=rid)
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == ([[40], [1, 1]] if kind == "last" else [[40, 40, 40]])


@kinds
@both_loops
@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("turns", range(1, 5))
def test_a_pause_changes_nothing(make_harness: MakeHarness, kind: str, overlap: bool, mode: Any, turns: int) -> None:
    harness = make_harness(CHUNKED, overlap=overlap, vectors=KINDS[kind], **PAGES)
    harness.submit(prompt_of(6, 1), 9)
    harness.pool(prompt_of(60))
    harness.pool(prompt_of(9, 3))
    harness.turn(turns)
    harness.control(PauseGenerationReqInput(mode=mode))
    harness.turn(2)
    harness.control(ContinueGenerationReqInput())
    harness.run()
    harness.assert_as_expected()
    begun = sum(int((step.pool_query.starts == 0).sum()) for step in harness.steps if step.pool_query is not None)
    if mode == "retract" and turns == 3:
        assert begun == (0 if kind == "last" else 3), "the test is void"


@kinds
@both_loops
@pytest.mark.parametrize("turns", range(1, 6))
def test_an_abort_sends_no_vector(make_harness: MakeHarness, kind: str, overlap: bool, turns: int) -> None:
    harness = make_harness(CHUNKED, overlap=overlap, vectors=KINDS[kind], **PAGES)
    gone, other = harness.pool(prompt_of(50)), harness.pool(prompt_of(30, 5))
    harness.turn(turns)
    harness.abort(gone, exact=True)
    after = harness.pool(prompt_of(50))
    harness.run()
    harness.assert_as_expected(other, after)
    answer = harness.answer(gone)
    assert answer.finish is not None
    assert answer.finish.type == "length" or (answer.finish.type == "abort" and answer.pooled is None)


@kinds
@both_loops
def test_a_half_computed_text_gives_way(make_harness: MakeHarness, kind: str, overlap: bool) -> None:
    """And is computed anew when there is room."""
    options = {"schedule_conservativeness": 0.0, "chunked_prefill_size": 8, "prefill_decode_interval": 8}
    harness = make_harness(options, overlap=overlap, eos_token_ids=NO_EOS, num_pages=64, vectors=KINDS[kind])
    harness.submit(prompt_of(10), 54)
    harness.turn(3)
    with mock.patch("jaxserve.scheduler.prefill_adder.PrefillAdder._fits_memory", return_value=True):
        rid = harness.pool(prompt_of(60, 1))
        harness.run()
    harness.assert_as_expected()
    times = harness.answer(rid).times
    assert times is not None and times.num_retractions >= 1


@kinds
def test_vectors_with_adapters(make_harness: MakeHarness, kind: str) -> None:
    harness = make_harness({"enable_lora": True, **CHUNKED}, num_adapter_slots=2, vectors=KINDS[kind], **PAGES)
    for name in "ab":
        load(harness, name)
    for i in range(12):
        harness.pool(prompt_of(30 + i % 3), lora=("a", "b", None)[i % 3])
        harness.submit(prompt_of(30), 4, lora=("b", None, "a")[i % 3])
        harness.turn(i % 2)
    until_idle(harness)
    harness.assert_as_expected()
    assert len({tuple(map(tuple, harness.expected_vectors(f"r{2 * i}"))) for i in range(3)}) == 3


@kinds
def test_texts_given_as_embeddings(make_harness: MakeHarness, kind: str) -> None:
    harness = make_harness(CHUNKED, vectors=KINDS[kind], **PAGES)
    prompt = prompt_of(40)
    harness.pool(prompt, embeds=embeddings_of(prompt))
    harness.run()
    harness.assert_as_expected()


@kinds
@both_loops
def test_a_vector_that_is_not_of_numbers(make_harness: MakeHarness, kind: str, overlap: bool) -> None:
    """It ends its own request alone, and what was computed for it is not used again."""
    harness = make_harness(CHUNKED, overlap=overlap, nan_token=77, vectors=KINDS[kind], **PAGES)

    def text(seed: int) -> list[int]:
        return [token if token != 77 else 78 for token in prompt_of(40, seed)]

    good = [harness.pool(text(seed)) for seed in range(3)]
    bad = harness.pool([*text(4)[:10], 77, *text(5)])
    generates = harness.submit(text(6), 3)
    good.append(harness.pool(text(7)))
    harness.run()
    again = harness.pool([*text(4)[:10], 77, *text(5)])
    harness.run()
    for rid in (bad, again):
        answer = harness.answer(rid)
        assert answer.finish == FinishReason.abort(
            "The model's vector was not of numbers (NaN or infinite) for this request.", 500, "InternalServerError"
        )
        assert answer.pooled is None and answer.cached_tokens == 0
    for rid in good:
        assert harness.answer(rid).pooled.tolist() == harness.expected_vectors(rid)
    assert harness.answer(generates).token_ids


ENCODER: dict[str, Any] = {"generates": False, "num_token_ids": 300, "page_size": 4, "num_pages": 60, "max_step_tokens": 64}


@pytest.mark.parametrize("kind", ["whole", "tokens"])
@both_loops
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_an_encoder(make_harness: MakeHarness, kind: str, overlap: bool, num_shards: int, num_stages: int) -> None:
    """Texts are never split, nothing is cached, and many share a step."""
    harness = make_harness(
        {"chunked_prefill_size": -1, "disable_radix_cache": True, "max_prefill_tokens": 64},
        overlap=overlap, vectors=KINDS[kind], context_len=64, num_shards=num_shards, num_stages=num_stages, **ENCODER,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    for i in range(100):
        harness.pool(rng.integers(0, 300, int(rng.choice([1, 5, 20, 50, 64]))).tolist())
        harness.turn(i % 7 == 0)
    harness.run()
    harness.assert_as_expected()
    assert harness.runner.vectors.num_resumed == 0
    assert {step.mode for step in harness.steps} == {ForwardMode.EXTEND}
    assert all(step.pool_query is not None and step.pool_query.ends.all() for step in harness.steps)
    assert not any(step.needs_sampling or step.sample.any() for step in harness.steps)
    assert len(harness.steps) < 70


def test_no_step_samples_for_a_vector(make_harness: MakeHarness) -> None:
    """Whatever its sampling parameters say."""
    harness = make_harness(vectors=KINDS["last"], eos_token_ids=NO_EOS)
    harness.pool(prompt_of(5), temperature=1.0, frequency_penalty=0.5)
    harness.run()
    (step,) = harness.steps
    assert not step.sample.any() and not step.needs_sampling and not step.needs_adjusting


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # the spec, the request, the sentence
    "no vectors": ({}, {"pools": True}, "The model makes no vectors of texts: it generates text."),
    "an embedding model": (
        {"generates": False, "vectors": KINDS["last"]},
        {},
        "The model generates no text: it makes embeddings of texts.",
    ),
    "a classifier": (
        {"generates": False, "vectors": KINDS["whole"]},
        {"return_logprob": True},
        "The model generates no text: it makes scores of texts.",
    ),
    "a tagger": (
        {"generates": False, "vectors": KINDS["tokens"]},
        {"max_new": None},
        "The model generates no text: it makes scores of the tokens of texts.",
    ),
    "tokens besides": (
        {"vectors": KINDS["last"]},
        {"pools": True, "max_new": 1},
        "Where a vector is wanted nothing is generated: max_new_tokens must be 0, got 1.",
    ),
    "logprobs besides": (
        {"vectors": KINDS["last"]},
        {"pools": True, "return_logprob": True},
        "Where a vector is wanted nothing else is returned: return_logprob must be false.",
    ),
    "hidden states besides": (
        {"vectors": KINDS["last"], "returns_hidden_states": True},
        {"pools": True, "return_hidden_states": "last"},
        "Where a vector is wanted nothing else is returned: return_hidden_states must be false.",
    ),
    "an unknown id": ({"vectors": KINDS["last"]}, {"pools": True, "prompt": [101]}, "input_ids must lie in [0, 101), got 101."),
    "an unknown type": (
        {"vectors": KINDS["last"], "num_token_ids": 202},
        {"pools": True, "prompt": [101, 202]},
        "input_ids must lie in [0, 202), got 202.",
    ),
    "too long": (
        {"vectors": KINDS["whole"], "context_len": 8},
        {"pools": True, "prompt": [1] * 9},
        "The prompt has 9 tokens; the context length is 8 tokens, prompt and output together.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(make_harness: MakeHarness, name: str) -> None:
    spec, request, sentence = REFUSALS[name]
    harness = make_harness(**spec)
    rid = harness.submit(**{"prompt": [5, 6], "max_new": 0} | request)
    harness.run()
    answer = harness.answer(rid)
    assert answer.finish == FinishReason.abort(sentence, 400, "BadRequestError") and answer.pooled is None


def test_a_text_that_fits_no_step(make_harness: MakeHarness) -> None:
    harness = make_harness({"chunked_prefill_size": -1, "disable_radix_cache": True}, vectors=KINDS["whole"], **ENCODER)
    rid = harness.pool([1] * 65)
    harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None
    assert finish.message == "The prompt has 65 tokens; with --chunked-prefill-size -1 it must fit one step of 64 tokens."


def test_ids_with_types_go_through(make_harness: MakeHarness) -> None:
    """No text is made of them, so no decoder meets an id that it does not know."""
    harness = make_harness(vectors=KINDS["whole"], num_token_ids=202)
    rid = harness.pool([5, 6, 105, 201])
    harness.run()
    harness.assert_as_expected()
    assert harness.answer(rid).prompt_tail == []


def test_steps_of_an_encoder_are_filled_up_with_short_texts(make_harness: MakeHarness) -> None:
    """What has no room left in a step is the first of the next."""
    options = {"chunked_prefill_size": -1, "disable_radix_cache": True}
    harness = make_harness(options, vectors=KINDS["whole"], keeps_kv=False, **ENCODER)
    for i, length in enumerate((40, 30, 20, 50, 4, 64, 10)):
        harness.pool(prompt_of(length, i))
    harness.run()
    harness.assert_as_expected()
    assert harness.prefill_lens() == [[40, 20, 4], [30, 10], [50], [64]]
