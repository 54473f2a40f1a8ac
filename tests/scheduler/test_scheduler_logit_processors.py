"""Requests with logit processors in a crowd: each gets the tokens that it would get alone, and what fails ends alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, fake_spec
from scheduler_harness import Harness, LetterDecoder, prompt_of
from sent import sent

from jaxserve.demo import demo_model_path
from jaxserve.grammar import GrammarCompiler
from jaxserve.logit_processors import ProcessorError, ProcessorHost, TokenRules
from jaxserve.messages import Sample, TokenizedGenerateReqInput
from jaxserve.scheduler import prefill_adder
from jaxserve.types import Grammar, LogitRules, NoRepeatNgram, SamplingParams, ThinkingBudget, ThinkingTag, UserProcessor

VOCAB_SIZE, EOS = 2048, 2046
GRAMMAR = Grammar("regex", "[0-9]{3,40}")
TAG, OPENING = ThinkingTag("de", None), ThinkingTag("b", None)
RULES = (
    LogitRules(ngram=NoRepeatNgram(1, 20, [7])),
    LogitRules(ngram=NoRepeatNgram(2, 200)),
    LogitRules(budget=ThinkingBudget(5, None, [TAG, ThinkingTag("", 900)], [10, 3, 4], [3, 4])),
    LogitRules(budget=ThinkingBudget(9, OPENING, [ThinkingTag("", 901)], [10, 901], [901], spent=3)),
    LogitRules(budget=ThinkingBudget(0, None, [ThinkingTag("", 902)], [902], [902]), ngram=NoRepeatNgram(1, 5)),
)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,), "page_size": 4, "num_pages": 64, "max_rows": 8, "context_len": 160,
}  # fmt: skip
OWN_CODE = {"enable_custom_logit_processor": True}


class StubHost:
    """Code that is a word: what it does is done here."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.calls: list[str] = []

    def apply(
        self, processor: UserProcessor, rid: str, prompt_ids: np.ndarray, output_ids: np.ndarray, logits: np.ndarray
    ) -> np.ndarray:
        self.calls.append(rid)
        if processor.code == b"fails":
            raise ProcessorError("custom_logit_processor raised nothing in particular.")
        if processor.code == b"loops":
            raise ProcessorError("custom_logit_processor took too long.", ended_process=True)
        changed = logits.copy()
        for line in range(len(changed)):
            outputs = output_ids[: len(output_ids) - (len(changed) - 1 - line)]
            changed[line, liked(self._runner, prompt_ids.tolist(), outputs.tolist())] = 1.0
        return changed


def liked(runner: FakeRunner, prompt: list[int], outputs: list[int]) -> int:
    """Mostly what drafts guess, so that some of them are accepted."""
    guessed = runner._next_token(np.array(prompt + outputs, np.int32), 0)
    return (guessed + (sum(outputs) % 5 == 0)) % VOCAB_SIZE


def alone(harness: Harness, compiler: GrammarCompiler, rid: str) -> list[int]:
    """What the request must be answered with, computed token by token."""
    message = harness.sent[rid]
    sampling, rules = message.sampling_params, message.logit_rules
    matcher = None if sampling.grammar is None else compiler.submit(sampling.grammar).result().matcher()
    prompt = message.input_ids.tolist()
    seed = 0 if sampling.is_greedy else sampling.sampling_seed
    assert seed is not None and sampling.max_new_tokens is not None
    out: list[int] = []
    while len(out) < sampling.max_new_tokens and (matcher is None or not matcher.is_terminated):
        mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
        if matcher is not None:
            matcher.fill_mask(mask)
        ids = np.array(prompt + out, np.int32)
        if rules is not None and rules.makes_masks:
            TokenRules(rules, len(prompt), LetterDecoder()).restrict(ids, mask)
        is_own = rules is not None and rules.user is not None
        token = liked(harness.runner, prompt, out) if is_own else harness.runner._next_token(ids, seed)
        token = harness.runner._first_allowed(token, mask)
        out.append(token)
        if token == EOS or (matcher is not None and not matcher.accept(token)):
            break
    return out


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler((Path(demo_model_path()) / "tokenizer.json").read_text(), VOCAB_SIZE, [EOS])
    compiler.submit(GRAMMAR).result()
    yield compiler
    compiler.close()


def run_until_answered(harness: Harness) -> None:
    deadline_s = time.monotonic() + 60
    while not (harness.scheduler.is_idle and not harness.transport.inbox):
        assert time.monotonic() < deadline_s, harness.scheduler.internal_state()
        harness.turn()
    harness.run()


def assert_as_alone(harness: Harness, compiler: GrammarCompiler) -> None:
    for rid, message in harness.sent.items():
        answer = harness.answer(rid)
        assert answer.finish is not None and answer.finish.type != "abort", answer.finish
        assert answer.token_ids == alone(harness, compiler, rid), (rid, message)


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_crowd_with_and_without_processors(
    compiler: GrammarCompiler, overlap: bool, num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_adder, "CLIP_MAX_NEW_TOKENS", 2)  # admits more than fits in the end
    rng = random.Random(num_draft_tokens)
    runner = FakeRunner(
        fake_spec(**SMALL | {"num_pages": 48, "max_step_tokens": 160}, num_draft_tokens=num_draft_tokens, moves_logits=True)
    )
    harness = Harness(
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "schedule_conservativeness": 0.0, **OWN_CODE},
        overlap=overlap, grammars=compiler, processors=StubHost(runner), text_decoder=LetterDecoder(), runner=runner,
    )  # fmt: skip
    own = LogitRules(user=UserProcessor(b"likes", b"{}"))
    for i in range(40):
        sampling: dict[str, Any] = {"temperature": 1.5, "sampling_seed": i} if rng.random() < 0.5 else {}
        rules = rng.choice((None, own, *RULES))
        if rules in (None, own, RULES[1]) and rng.random() < 0.5:
            sampling["regex"] = GRAMMAR.text
        prompt, max_new = prompt_of(rng.randint(1, 60), i % 5), rng.choice([3, 60])
        harness.submit(prompt, max_new, return_logprob=i % 4 == 0, logit_rules=rules, **sampling)
        harness.turn(rng.randint(0, 3))
    run_until_answered(harness)
    assert_as_alone(harness, compiler)
    state = harness.scheduler.internal_state()
    assert state["num_retractions"] > 0 and (num_draft_tokens == 1 or state["avg_spec_accept_length"] > 1)
    harness.close()


def test_samples_of_one_prompt_each_have_their_own(compiler: GrammarCompiler) -> None:
    harness = Harness(text_decoder=LetterDecoder(), **SMALL)
    message = TokenizedGenerateReqInput(
        rid="first",
        input_ids=np.array(prompt_of(9), np.int32),
        sampling_params=SamplingParams(max_new_tokens=30, sampling_seed=1),
        logit_rules=RULES[3],
        more_samples=[Sample(f"sample{seed}", seed) for seed in (2, 3)],
    )
    harness.sent = {one.rid: one for one in message.sequences()}
    harness.send(message)
    run_until_answered(harness)
    assert_as_alone(harness, compiler)
    harness.close()


def test_thinking_waits_for_nobody_until_its_budget_ends() -> None:
    harness = Harness(text_decoder=LetterDecoder(), **SMALL)
    rules = LogitRules(budget=ThinkingBudget(12, None, [ThinkingTag("", 900)], [900], [900]))
    rid = harness.submit(prompt_of(9), 30, logit_rules=rules)
    harness.run()
    assert harness.answer(rid).token_ids[12] == 900
    needs = [step.needs_masks for step in harness.steps]
    assert not any(needs[:12]) and needs[12] and not any(needs[14:]), needs
    harness.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_what_fails_ends_alone_and_once(overlap: bool) -> None:
    runner = FakeRunner(fake_spec(moves_logits=True, **SMALL))
    host = StubHost(runner)
    harness = Harness(OWN_CODE, overlap=overlap, processors=host, runner=runner)
    rules = {word: LogitRules(user=UserProcessor(word.encode(), b"{}")) for word in ("likes", "fails", "loops")}
    good = [harness.submit(prompt_of(5, i), 12, logit_rules=rules["likes"]) for i in range(2)]
    plain = harness.submit(prompt_of(5, 7), 12)
    harness.turn(4)
    bad = [harness.submit(prompt_of(6, i), 12, logit_rules=rules[word]) for i, word in enumerate(["fails", "loops", "loops"])]
    harness.run()
    for rid in bad:
        finish = harness.answer(rid).finish
        assert finish is not None and (finish.type, finish.status_code) == ("abort", 400)
        assert finish.message is not None and finish.message.startswith("custom_logit_processor ")
    assert host.calls.count(bad[1]) + host.calls.count(bad[2]) == 1, "everybody waits for such a call: it is made once"
    for rid in good:
        prompt, out = harness.sent[rid].input_ids.tolist(), harness.answer(rid).token_ids
        assert len(out) == 12 and all(token == liked(harness.runner, prompt, out[:i]) for i, token in enumerate(out))
    harness.assert_as_expected(plain)
    harness.close()


def test_code_is_refused_where_the_operator_does_not_allow_it() -> None:
    harness = Harness(**SMALL)
    rid = harness.submit([1, 2], 4, logit_rules=LogitRules(user=UserProcessor(b"likes", b"{}")))
    harness.run()
    finish = harness.answer(rid).finish
    assert finish is not None and finish.message is not None and "--enable-custom-logit-processor" in finish.message
    harness.close()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_real_code_in_its_process(num_draft_tokens: int) -> None:
    host = ProcessorHost(timeout_s=5.0)
    harness = Harness(OWN_CODE, processors=host, moves_logits=True, num_draft_tokens=num_draft_tokens, **SMALL)
    echo = harness.submit([5, 6, 7], 20, logit_rules=LogitRules(user=sent("Echo")))
    forced = harness.submit([5, 6, 7], 6, logit_rules=LogitRules(user=sent("ForceToken", token_id=77)))
    broken = harness.submit([5, 6, 7], 6, logit_rules=LogitRules(user=sent("Raises")))
    plain = harness.submit([5, 6, 7], 6)
    try:
        run_until_answered(harness)
    finally:
        host.close()
    out = harness.answer(echo).token_ids
    assert out == [1, *((last * 3 + count) % VOCAB_SIZE for count, last in enumerate(out[:-1], 1))]
    assert harness.answer(forced).token_ids == [77] * 6
    finish = harness.answer(broken).finish
    assert finish is not None and finish.message == "custom_logit_processor raised RuntimeError: no such luck."
    harness.assert_as_expected(plain)
    harness.close()


def test_nothing_left_to_sample_is_the_requests_fault(compiler: GrammarCompiler) -> None:
    harness = Harness(grammars=compiler, **SMALL)
    rid = harness.submit(prompt_of(4), 20, regex="a{9}", logit_rules=LogitRules(ngram=NoRepeatNgram(1, 100)))
    run_until_answered(harness)
    finish = harness.answer(rid).finish
    assert finish is not None and finish.message is not None
    assert (finish.status_code, finish.message[:28]) == (400, "No token is left to sample: ")
    harness.close()
