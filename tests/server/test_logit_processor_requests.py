"""What a request says of logit processors: what the scheduler is told of it, and which sentences refuse it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxserve.demo import demo_model_path
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.server.logit_processors import NO_RULES, RulePlan, plan_rules, rules_of
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import PromptOptions, RequestError
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.types import LogitRules, NoRepeatNgram, SamplingParams

QWEN3 = REASONING_FORMATS["qwen3"]
LIMITS = ModelLimits(
    context_len=1000,
    vocab_size=2048,
    hidden_size=8,
    max_total_tokens=1000,
    max_top_logprobs=5,
    allow_auto_truncate=False,
    reasoning=QWEN3,
)
CODE = '{"callable": "80044b032e"}'  # a pickle of 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo_model_path())


def plan(processor: str | None = None, *, limits: ModelLimits = LIMITS, most: int | None = None, **params: Any) -> RulePlan:
    sampling = SamplingParams(custom_params=params or None)
    return plan_rules(sampling, PromptOptions(custom_logit_processor=processor, max_thinking_tokens=most), limits)


def test_what_is_asked_for() -> None:
    assert plan() is NO_RULES
    assert plan("thinking_budget", thinking_budget=7) == plan(most=7) == plan(thinking_budget=7) == RulePlan(7)
    assert (
        plan("thinking_budget", most=7) == plan("Qwen3ThinkingBudgetLogitProcessor", thinking_budget=9, most=7) == RulePlan(7)
    )
    assert plan("disallowed_tokens", token_ids=[5, 6, 5]) == RulePlan(biases={5: -math.inf, 6: -math.inf})
    assert plan("no_repeat_ngram", ngram_size=2, window_size=9, most=3) == RulePlan(3, NoRepeatNgram(2, 9))
    own = plan(CODE, limits=dataclasses.replace(LIMITS, runs_user_code=True), a=[2**70])
    assert own.user is not None and (own.user.code, own.user.params) == (b"\x80\x04K\x03.", b'{"a": [1180591620717411303424]}')


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"processor": "nobody"}, "has no processor 'nobody'; there are thinking_budget, disallowed_tokens, no_repeat_ngram"),
        ({"processor": ""}, "has no processor ''"),
        ({"processor": CODE}, "--enable-custom-logit-processor"),
        ({"processor": "{}"}, "must be a name, or JSON of the form"),
        ({"processor": '{"callable": "xyz"}'}, "must be a name, or JSON of the form"),
        ({"processor": '{"callable": 5}'}, "must be a name, or JSON of the form"),
        ({"processor": "{" * 10_000}, "must be a name, or JSON of the form"),
        ({"processor": '{"callable": "' + "00" * (1 << 22) + '"}'}, "may have at most 4194304 characters, got 8388624"),
        ({"processor": "thinking_budget"}, "custom_params.thinking_budget must be an integer in [0, 2147483647], got null"),
        ({"processor": "thinking_budget", "thinking_budget": True}, "got True"),
        ({"processor": "thinking_budget", "thinking_budget": -1}, "got -1"),
        ({"thinking_budget": 2.5}, "got 2.5"),
        ({"thinking_budget": 2, "more": 1}, "custom_params has no field 'more' for thinking_budget"),
        ({"more": 1}, "custom_params is for a custom_logit_processor"),
        ({"most": -1}, "max_thinking_tokens must be in [0, 2147483647], got -1"),
        ({"processor": "disallowed_tokens"}, "custom_params.token_ids must be a list of token ids, got null"),
        ({"processor": "disallowed_tokens", "token_ids": [2048]}, "must hold token ids in [0, 2048), got 2048"),
        ({"processor": "disallowed_tokens", "token_ids": ["5"]}, "must hold token ids in [0, 2048), got '5'"),
        ({"processor": "disallowed_tokens", "token_ids": [5] * 513}, "may hold at most 512 tokens, got 513"),
        ({"processor": "no_repeat_ngram", "ngram_size": 2}, "custom_params.window_size must be an integer in [1, 1048576]"),
        ({"processor": "no_repeat_ngram", "ngram_size": 0, "window_size": 1}, "custom_params.ngram_size must be an integer"),
        ({"most": 3, "limits": dataclasses.replace(LIMITS, reasoning=None)}, "(--reasoning-parser)"),
        ({"most": 3, "limits": dataclasses.replace(LIMITS, makes_text=False)}, "(--skip-tokenizer-init)"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as raised:
        plan(given.pop("processor", None), **given)
    assert said in raised.value.message and raised.value.status_code == 400
    assert raised.value.param in ("custom_logit_processor", "custom_params", "max_thinking_tokens")


def budget(tokenizer: Tokenizer, prompt: str, *, is_open: bool = False) -> Any:
    ids = np.array(tokenizer.encode(prompt, add_special_tokens=False), np.int32)
    rules = rules_of(RulePlan(9), ids, QWEN3, tokenizer, is_open=is_open)
    return None if rules is None else rules.budget


def test_where_a_prompt_stands_in_its_thinking(tokenizer: Tokenizer) -> None:
    thought = "Well, let me see."
    count = len(tokenizer.encode(thought, add_special_tokens=False))
    assert budget(tokenizer, "Hello").begin.text == "<think>"
    opened = budget(tokenizer, "Hello <think>")
    assert (opened.begin, opened.spent) == (None, 0)
    assert (budget(tokenizer, "Hello", is_open=True).begin, budget(tokenizer, "Hello", is_open=True).spent) == (None, 0)
    assert abs(budget(tokenizer, f"Hello <think>{thought}").spent - count) <= 1
    assert budget(tokenizer, "<think>\n\n</think>") is None
    again = budget(tokenizer, "<think>a b c</think> 4 <|im_end|> And?<think>")
    assert (again.begin, again.spent) == (None, 0)


def test_what_closes_it(tokenizer: Tokenizer) -> None:
    found = budget(tokenizer, "Hello <think>")
    assert tokenizer.decode(found.closing, skip_special_tokens=False) == "\n</think>"
    assert tokenizer.decode(found.closing_behind_newline, skip_special_tokens=False) == "</think>"
    assert [tag.text for tag in found.ends] == ["</think>", "<tool_call>"]


def test_nothing_to_tell(tokenizer: Tokenizer) -> None:
    ids = np.array([1], np.int32)
    assert rules_of(NO_RULES, ids, None, None, is_open=False) is None
    assert rules_of(plan("disallowed_tokens", token_ids=[5]), ids, None, None, is_open=False) is None
    ngram = NoRepeatNgram(2, 9)
    assert rules_of(RulePlan(ngram=ngram), ids, None, None, is_open=False) == LogitRules(ngram=ngram)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_every_format_says_how_it_is_closed(name: str) -> None:
    reasoning = REASONING_FORMATS[name]
    assert reasoning.closing.endswith(reasoning.end)
    parser = reasoning.parser(is_open=True)
    begin = reasoning.begin or ""
    pieces = [*parser.feed(f"{begin}hm{reasoning.closing}Paris"), *parser.finish()]
    assert "".join(piece.text for piece in pieces if type(piece).__name__ == "Content").strip() == "Paris"
