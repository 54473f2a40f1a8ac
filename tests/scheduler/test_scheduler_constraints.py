"""Constrained requests in a crowd: each gets the tokens that it would get alone, one by one, under the masks of its grammar."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_adapters import adapter_number
from scheduler_harness import Harness, prompt_of
from tokenizers import Tokenizer

from jaxserve.demo import demo_model_path
from jaxserve.grammar import GrammarCompiler, JsonStyle, Matcher, ThinkingMatcher
from jaxserve.messages import Sample, TokenizedGenerateReqInput
from jaxserve.scheduler import prefill_adder
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput
from jaxserve.scheduler.control.update_weights_from_disk import UpdateWeightFromDiskReqInput
from jaxserve.types import Grammar, SamplingParams, Thinking

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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(demo_model_path()) / "tokenizer.json"))


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
    seed += adapter_number(harness.folders[rid]) if rid in harness.folders else 0
    out: list[int] = []
    while len(out) < sampling.max_new_tokens and not matcher.is_terminated:
        matcher.fill_mask(mask)
        token = harness.runner._first_allowed(harness.runner._next_token(np.array(history + out, np.int32), seed), mask)
        if token == EOS:
            out.append(token)
            break
        if matcher.accept(token):
            out.append(token)
            matcher = matcher.current
        else:  # it ends the thinking and begins the answer wrongly; now the mask knows
            assert isinstance(matcher, ThinkingMatcher)
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
        assert answer.finish is not None and answer.finish.type != "abort", answer.finish
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


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,), "page_size": 4, "num_pages": 64, "max_rows": 8, "context_len": 160,
}  # fmt: skip


def test_samples_of_one_prompt_follow_the_grammar_each_for_itself(compiler: GrammarCompiler) -> None:
    harness = Harness(grammars=compiler, **SMALL)
    message = TokenizedGenerateReqInput(
        rid="first",
        input_ids=np.array(prompt_of(9), np.int32),
        sampling_params=SamplingParams(max_new_tokens=30, sampling_seed=1, regex=GRAMMARS[0].text),
        thinking=THINKING[0],
        more_samples=[Sample(f"sample{seed}", seed) for seed in (2, 3)],
    )
    harness.sent = {one.rid: one for one in message.sequences()}
    harness.send(message)
    run_until_answered(harness)
    answers = [harness.answer(rid).token_ids for rid in harness.sent]
    assert answers == [alone(harness, compiler, rid) for rid in harness.sent] and answers[0] != answers[1] != answers[2]
    harness.close()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(compiler: GrammarCompiler, mode: Any, num_draft_tokens: int) -> None:
    for turns in range(1, 14, 2):
        harness = Harness(grammars=compiler, num_draft_tokens=num_draft_tokens, **SMALL)
        for i, thinking in enumerate((None, *THINKING)):
            harness.submit(prompt_of(5 + i), 30, thinking=thinking, regex=GRAMMARS[1].text)
        harness.turn(turns)
        harness.control(PauseGenerationReqInput(mode=mode))
        harness.turn(2)
        harness.control(ContinueGenerationReqInput())
        run_until_answered(harness)
        for rid in harness.sent:
            assert harness.answer(rid).token_ids == alone(harness, compiler, rid), (rid, turns)
        harness.close()


def test_weights_are_replaced_between_constrained_requests(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Those that run end first, those whose grammar compiles meanwhile come after; all follow their grammars."""
    harness = Harness(grammars=compiler, **SMALL)
    rids = [harness.submit(prompt_of(6, i), 60, regex=GRAMMARS[0].text) for i in range(4)]
    harness.turn(3)
    harness.control(UpdateWeightFromDiskReqInput(model_path="new"))
    harness.turn()
    rids.append(harness.submit(prompt_of(6, 9), 60, regex=f"{GRAMMARS[0].text}|never compiled before"))
    give_up_s = time.monotonic() + 60
    while not harness.control_replies():
        assert time.monotonic() < give_up_s
        harness.turn()
    run_until_answered(harness)
    for rid in rids:
        text = tokenizer.decode([token for token in harness.answer(rid).token_ids if token != EOS])
        assert re.fullmatch(GRAMMARS[0].text, text), text
    harness.close()


def test_thinking_that_never_ends_ends_by_length_and_stops_count_in_it(compiler: GrammarCompiler) -> None:
    harness = Harness(grammars=compiler, **SMALL)
    forever = Thinking(None, "</never>")
    long = harness.submit(prompt_of(6), 40, thinking=forever, ignore_eos=True, regex="a")
    free = harness.submit(prompt_of(6), 40, ignore_eos=True)
    run_until_answered(harness)
    answer = harness.answer(long)
    assert answer.token_ids == harness.answer(free).token_ids
    assert answer.finish is not None and answer.finish.type == "length"
    assert not any(step.needs_masks for step in harness.steps), "nobody waits for what thinks"
    stopped = harness.submit(prompt_of(6), 40, thinking=forever, regex="a", stop_token_ids=answer.token_ids[5:6])
    run_until_answered(harness)
    assert harness.answer(stopped).token_ids == answer.token_ids[:6]
    harness.close()


RECORD = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "a_long_name": {"type": "integer", "maximum": 99, "minimum": 0},
                "another_name": {"enum": ["yes", "no"]},
            },
            "required": ["a_long_name", "another_name"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def compact() -> Iterator[GrammarCompiler]:
    """JSON without white space: most of it is forced."""
    text = (Path(demo_model_path()) / "tokenizer.json").read_text()
    compiler = GrammarCompiler(text, VOCAB_SIZE, [EOS], json_style=JsonStyle(any_whitespace=False))
    compiler.submit(RECORD).result()
    yield compiler
    compiler.close()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_forced_tokens_are_taken_over_at_once(
    compact: GrammarCompiler, overlap: bool, num_draft_tokens: int, count: int
) -> None:
    num_steps = []
    for disable in (False, True):
        harness = Harness(
            {"disable_jump_forward": disable}, overlap=overlap, grammars=compact, num_draft_tokens=num_draft_tokens, **SMALL
        )
        for i in range(count):
            more = {"temperature": 1.0, "sampling_seed": i} if i % 2 else {}
            harness.submit(prompt_of(30, i), 60, stream=i == 0, json_schema=RECORD.text, **more)
        run_until_answered(harness)
        for rid in harness.sent:
            answer = harness.answer(rid)
            assert answer.token_ids == alone(harness, compact, rid), rid
            assert answer.finish is not None and answer.finish.type == "stop"
            assert answer.times is not None and not answer.times.num_retractions and not answer.cached_tokens
        assert bool(harness.scheduler.internal_state()["num_jumps"]) is not disable
        num_steps.append(len(harness.steps))
        harness.close()
    if count == 1 and num_draft_tokens == 1:
        assert num_steps[0] * 2 < num_steps[1], num_steps


def test_jumps_and_lengths(compact: GrammarCompiler) -> None:
    """Wherever the output ends by length, and whatever looks at its tokens."""
    for max_new in range(1, 40, 2):
        harness = Harness(grammars=compact, **SMALL)
        rid = harness.submit(prompt_of(7), max_new, json_schema=RECORD.text)
        with_logprobs = harness.submit(prompt_of(7), max_new, json_schema=RECORD.text, return_logprob=True)
        run_until_answered(harness)
        assert harness.answer(rid).token_ids == alone(harness, compact, rid) == harness.answer(with_logprobs).token_ids
        harness.close()


def test_a_crowd_that_jumps(compact: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """With retraction, mixed steps, pauses and aborts, and LoRA adapters that take turns in a slot."""
    monkeypatch.setattr(prefill_adder, "CLIP_MAX_NEW_TOKENS", 2)
    for seed in range(4):
        rng = random.Random(seed)
        harness = Harness(
            {"enable_mixed_chunk": bool(seed % 2), "chunked_prefill_size": 32, "schedule_conservativeness": 0.0},
            grammars=compact, **{**SMALL, "num_pages": 40, "max_rows": 5, "num_adapter_slots": 1},
        )  # fmt: skip
        harness.scheduler.adapters.load_initial(["a=/a", "b=/b"])
        for i in range(16):
            harness.submit(
                prompt_of(rng.randint(1, 40), i % 3), 60, thinking=rng.choice((None, THINKING[0])), json_schema=RECORD.text,
                lora="ab"[i % 2] if seed > 1 else None,
            )  # fmt: skip
            harness.turn(rng.randint(0, 12))
            if i % 7 == 3:
                harness.abort(f"r{i}", exact=True)
            if i % 5 == 4:
                harness.control(PauseGenerationReqInput(mode=rng.choice(["retract", "in_place"])))
                harness.turn()
                harness.control(ContinueGenerationReqInput())
        run_until_answered(harness)
        for rid in harness.sent:
            answer = harness.answer(rid)
            assert answer.finish is not None
            expected = alone(harness, compact, rid) if answer.finish.type != "abort" else None
            assert expected is None or answer.token_ids == expected, rid
        assert harness.scheduler.internal_state()["num_jumps"] > 0
        harness.close()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_logprobs_of_an_answer_that_begins_with_forced_tokens(compiler: GrammarCompiler, num_draft_tokens: int) -> None:
    """The request is sent back when its thinking ends; what is forced then is sampled, for it has logprobs."""
    harness = Harness(grammars=compiler, num_draft_tokens=num_draft_tokens, **SMALL)
    text = "The answer to this question is [0-9]{3}"
    rids = [
        harness.submit(
            prompt_of(6, i), 140, return_logprob=True, thinking=THINKING[0], regex=text, temperature=1.5, sampling_seed=i
        )
        for i in range(4)
    ]
    run_until_answered(harness)
    for rid in rids:
        answer = harness.answer(rid)
        assert answer.token_ids == alone(harness, compiler, rid)
        assert sum(len(part.logprobs) for part in answer.logprobs) == len(answer.token_ids)
    harness.close()
