"""Constrained requests in a crowd: each gets the tokens that it would get alone, one by one, under the masks of its grammar."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scheduler_harness import Harness, prompt_of

from jaxserve.demo import demo_model_path
from jaxserve.grammar import GrammarCompiler, Matcher, ThinkingMatcher
from jaxserve.scheduler import prefill_adder
from jaxserve.types import Grammar, Thinking

VOCAB_SIZE, EOS = 2048, 2046
GRAMMARS = (
    Grammar("regex", "(red|green|blue)(,(red|green|blue)){0,4}"),
    Grammar("regex", "[0-9]{3,40}"),
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["a", "b", 7]}, "minItems": 1, "maxItems": 6}'),
    Grammar("ebnf", 'root ::= ("x" | "yz")+ "."'),
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler((Path(demo_model_path()) / "tokenizer.json").read_text(), VOCAB_SIZE, [EOS])
    for grammar in GRAMMARS:
        compiler.submit(grammar).result()
    yield compiler
    compiler.close()


THINKING = (Thinking(None, "e"), Thinking(None, "he"), Thinking("t", "in"), Thinking("<tool_call>", " a"))


def alone(harness: Harness, compiler: GrammarCompiler, rid: str) -> list[int]:
    """What the request must be answered with, computed token by token."""
    message = harness.sent[rid]
    sampling = message.sampling_params
    grammar = sampling.grammar
    if grammar is None:
        return harness.expected(rid)
    matcher: Matcher | ThinkingMatcher
    if message.thinking is None:
        matcher = compiler.submit(grammar).result().matcher()
    else:
        matcher = compiler.submit_behind(message.thinking, grammar).result().matcher()
    history, mask = message.input_ids.tolist(), np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    seed = 0 if sampling.is_greedy else sampling.sampling_seed
    assert seed is not None and sampling.max_new_tokens is not None
    out: list[int] = []
    while len(out) < sampling.max_new_tokens and not matcher.is_terminated:
        matcher.fill_mask(mask)
        token = harness.runner._next_token(np.array(history + out, np.int32), seed, mask)
        out.append(token)
        if token == EOS:
            break
        if not matcher.accept(token):  # it shares a token with the end of thinking
            finish = harness.answer(rid).finish
            assert finish is not None and finish.status_code == 400
            break
        matcher = matcher.current
    return out


def run_until_answered(harness: Harness) -> None:
    """Grammars compile in other threads, at their own pace."""
    deadline_s = time.monotonic() + 60
    while not (harness.scheduler.is_idle and not harness.transport.inbox):
        assert time.monotonic() < deadline_s, harness.scheduler.internal_state()
        harness.turn()
    harness.run()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_crowd_of_constrained_and_free_requests(
    compiler: GrammarCompiler, overlap: bool, num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_adder, "CLIP_MAX_NEW_TOKENS", 2)  # admits more than fits in the end
    rng = random.Random(num_draft_tokens)
    harness = Harness(
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "schedule_conservativeness": 0.0},
        overlap=overlap, grammars=compiler, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), num_draft_tokens=num_draft_tokens,
        num_pages=48, page_size=4, max_rows=8, context_len=160, max_step_tokens=160,
    )  # fmt: skip
    for i in range(40):
        grammar = rng.choice((None, *GRAMMARS))
        sampling = {} if grammar is None else {grammar.kind: grammar.text}
        thinking = None if grammar is None else rng.choice((None, *THINKING))
        if rng.random() < 0.5:
            sampling |= {"temperature": 1.5, "sampling_seed": i}
        prompt, max_new = prompt_of(rng.randint(1, 60), i % 5), rng.choice([3, 60])
        harness.submit(prompt, max_new, return_logprob=i % 4 == 0, thinking=thinking, **sampling)
        harness.turn(rng.randint(0, 3))
    run_until_answered(harness)
    for rid in harness.sent:
        answer = harness.answer(rid)
        expected = alone(harness, compiler, rid)
        assert answer.finish is not None
        assert answer.finish.type != "abort" or harness.sent[rid].thinking is not None, answer.finish
        assert answer.token_ids == expected, rid
    state = harness.scheduler.internal_state()
    assert state["num_retractions"] > 0
    assert state["num_grammar_queue_reqs"] == 0
    harness.close()


def test_an_invalid_grammar_ends_its_request_alone(compiler: GrammarCompiler) -> None:
    harness = Harness(grammars=compiler, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    bad = harness.submit([1, 2, 3], regex="(unclosed")
    good = harness.submit([1, 2, 3], 4)
    run_until_answered(harness)
    finish = harness.answer(bad).finish
    assert finish is not None and (finish.type, finish.status_code) == ("abort", 400)
    assert finish.message is not None and finish.message.startswith("regex")
    harness.assert_as_expected(good)
    harness.close()


def test_a_request_can_be_aborted_and_time_out_while_its_grammar_compiles() -> None:
    class Never:
        done = False

        def result(self) -> None: ...

        def abandon(self) -> None: ...

    class Slow:
        def submit(self, grammar: Grammar) -> Never:
            return Never()

    harness = Harness({"request_waiting_timeout_s": 1.0}, grammars=Slow())
    gone, late = harness.submit([1, 2], regex="a"), harness.submit([1, 2], regex="b")
    harness.turn()
    assert harness.scheduler.internal_state()["num_grammar_queue_reqs"] == 2
    assert not harness.scheduler.is_idle and harness.scheduler.wait_s
    harness.abort(gone)
    harness.turn(150)
    for rid, status in ((gone, None), (late, 503)):
        finish = harness.answer(rid).finish
        assert finish is not None and (finish.type, finish.status_code) == ("abort", status)
    assert harness.scheduler.is_idle
    harness.close()
