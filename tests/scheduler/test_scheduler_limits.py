"""What is refused, and with which sentence: prompts that cannot be served, a full queue, time-outs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_harness import Harness, LetterDecoder, prompt_of

from jaxserve.grammar import CompiledGrammar
from jaxserve.types import FinishReason, Grammar


def refusal(harness: Harness, rid: str) -> tuple[int | None, str]:
    finish = harness.answer(rid).finish
    assert finish is not None and finish.type == "abort", finish
    assert harness.answer(rid).token_ids == []
    return finish.status_code, finish.message or ""


@pytest.mark.parametrize(
    ("prompt", "request_fields", "sentence"),
    [
        ([], {}, "The prompt is empty; at least one token is needed."),
        (prompt_of(256), {}, "The prompt has 256 tokens; the context length is 256 tokens, prompt and output together."),
        (
            prompt_of(257),
            {"max_new": 0},
            "The prompt has 257 tokens; the context length is 256 tokens, prompt and output together.",
        ),
        (prompt_of(150), {}, "The prompt has 150 tokens; the KV cache holds 100 in all."),
        ([1, 101], {}, "input_ids must lie in [0, 101), got 101."),
        ([1, -1], {}, "input_ids must lie in [0, 101), got -1."),
        ([1], {"stop": ["x"]}, "stop needs a tokenizer, and this server runs without one; use stop_token_ids."),
        ([1], {"stop_regex": ["x"]}, "stop_regex needs a tokenizer, and this server runs without one; use stop_token_ids."),
        (
            [1],
            {"return_logprob": True, "top_logprobs_num": 5},
            "top_logprobs_num may be at most 4 (--max-top-logprobs), got 5.",
        ),
    ],
)  # fmt: skip
def test_sentences(
    make_harness: Callable[..., Harness], prompt: list[int], request_fields: dict[str, Any], sentence: str
) -> None:
    harness = make_harness(num_pages=100)
    rid = harness.submit(prompt, **request_fields)
    harness.run()
    assert refusal(harness, rid) == (400, sentence)
    assert harness.answer(rid).prompt_tokens == len(prompt)


def test_a_prompt_as_long_as_the_context_may_be_computed(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    rid = harness.submit(prompt_of(256), 0)
    harness.run()
    assert harness.answer(rid).finish == FinishReason.length_limit(0)


def test_a_prompt_larger_than_a_step_that_may_not_be_split(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"chunked_prefill_size": -1})
    rid = harness.submit(prompt_of(129))
    harness.run()
    assert refusal(harness, rid) == (
        400, "The prompt has 129 tokens; with --chunked-prefill-size -1 it must fit one step of 128 tokens.",
    )  # fmt: skip


def test_a_bad_pattern(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(text_decoder=LetterDecoder())
    rid = harness.submit([1], stop_regex=["ok", "(["])
    harness.run()
    status, sentence = refusal(harness, rid)
    assert status == 400 and sentence.startswith("stop_regex '([' is not a regular expression")


def test_a_rid_in_use(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    harness = make_harness(max_rows=1)
    harness.submit(prompt_of(5), 20, rid="same")
    harness.turn(2)
    harness.submit(prompt_of(5), 20, rid="same")
    harness.turn()
    assert refusal(harness, "same") == (400, "The request id 'same' is in use.")
    assert "same is in use" in caplog.text
    del harness.transport.answers["same"]
    harness.abort("same")
    harness.run()
    assert harness.answer("same").finish is not None


FULL = FinishReason.abort("The request queue is full.", 503, "ServiceUnavailableError")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_full_queue(make_harness: Callable[..., Harness], overlap: bool) -> None:
    harness = make_harness({"max_queued_requests": 2}, overlap=overlap, max_rows=1)
    rids = [harness.submit(prompt_of(5, i)) for i in range(5)]
    harness.turn()
    for rid in rids[3:]:
        assert harness.answer(rid).finish == FULL
    harness.run()
    later = harness.submit(prompt_of(5, 9))  # the queue is empty again
    harness.run()
    harness.assert_as_expected(*rids[:3], later)


class NeverCompiled:
    """A compiler, and what it promises."""

    done = False

    def submit(self, grammar: Grammar) -> NeverCompiled:
        return self

    def result(self) -> CompiledGrammar:
        raise AssertionError("it is not done")

    def abandon(self) -> None:
        pass


def test_those_whose_grammar_is_being_compiled_wait_too(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"max_queued_requests": 2}, grammars=NeverCompiled())
    rids = [harness.submit(prompt_of(5), regex="a") for _ in range(5)]
    harness.turn()
    assert [harness.transport.answers[rid].finish for rid in rids if rid in harness.transport.answers] == [FULL] * 2
    harness.abort(abort_all=True)
    harness.turn()
    assert harness.scheduler.is_idle


@pytest.mark.parametrize("limit", [0, 1])
def test_only_those_that_have_to_wait_count(make_harness: Callable[..., Harness], limit: int) -> None:
    harness = make_harness({"max_queued_requests": limit}, max_rows=4)
    rids = [harness.submit(prompt_of(5, i), 20, ignore_eos=True) for i in range(4)]
    harness.turn(3)
    more = [harness.submit(prompt_of(5, 10 + i)) for i in range(3)]
    harness.run()
    harness.assert_as_expected(*rids, *more[:limit])
    assert [harness.answer(rid).finish for rid in more[limit:]] == [FULL] * (3 - limit)


def test_who_shares_a_prompt_with_one_being_computed_does_not_count(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"max_queued_requests": 0})
    rids = [harness.submit(prompt_of(50), seed) for seed in (8, 9, 10)]
    harness.run()
    harness.assert_as_expected(*rids)
    assert harness.answer(rids[1]).cached_tokens > 0


def test_a_newcomer_is_tried_before_it_is_refused(make_harness: Callable[..., Harness]) -> None:
    """Between two prefill steps stands a decode step; who comes then has not been tried yet."""
    harness = make_harness({"max_queued_requests": 0, "prefill_decode_interval": 3})
    first = harness.submit(prompt_of(5), 20, ignore_eos=True)
    harness.turn(2)
    second = harness.submit(prompt_of(6))
    harness.run()
    harness.assert_as_expected(first, second)


def test_waiting_too_long(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"request_waiting_timeout_s": 2.0}, max_rows=1)
    running, waiting = harness.submit(prompt_of(5), 40, ignore_eos=True), harness.submit(prompt_of(6))
    harness.turn(3)
    harness.clock.now_s += 1.0
    harness.turn()
    assert waiting not in harness.transport.answers
    harness.clock.now_s += 1.5
    harness.turn()
    assert refusal(harness, waiting) == (503, "The request waited longer than 2 s in the queue.")
    harness.run()
    harness.assert_as_expected(running)


def test_running_too_long(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness({"request_running_timeout_s": 2.0})
    rid = harness.submit(prompt_of(5), 100, ignore_eos=True)
    harness.turn(5)
    harness.clock.now_s += 2.5
    late = harness.submit(prompt_of(6), 100, ignore_eos=True)
    harness.run()
    finish = harness.answer(rid).finish
    assert finish == FinishReason.abort("The request ran longer than 2 s.", 503, "ServiceUnavailableError")
    assert 0 < len(harness.answer(rid).token_ids) < 100
    harness.assert_as_expected(late)
