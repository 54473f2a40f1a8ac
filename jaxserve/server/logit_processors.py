"""From a request's fields (custom_logit_processor, custom_params, max_thinking_tokens) to what the scheduler is told of them.

`plan_rules` needs nothing but the fields and refuses what is wrong; `rules_of` needs the prompt, too: whether it has begun to
think, and how much.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.logit_processors import names
from jaxserve.parsers.base import ReasoningFormat
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError
from jaxserve.server.thinking_tokens import tag_of
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.types import MAX_LOGIT_BIAS, LogitRules, NoRepeatNgram, SamplingParams, ThinkingBudget, ThinkingTag, UserProcessor

# Of a prompt so many last tokens are searched for thinking that it has begun.
_TAIL_TOKENS = 8192
# Code goes to the scheduler once for each prompt.
_MOST_CODE_BYTES = 64 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class RulePlan:
    """What the logit processors of a prompt's sequences do."""

    thinking_tokens: int | None = None
    ngram: NoRepeatNgram | None = None
    user: UserProcessor | None = None
    biases: dict[int, float] = dataclasses.field(default_factory=dict)  # on top of the request's own


NO_RULES = RulePlan()


def plan_all(req: GenerateReqInput, limits: ModelLimits) -> list[RulePlan]:
    """Of each prompt; those that ask for the same share theirs. Raises RequestError."""
    shared: dict[tuple[int, int], RulePlan] = {}
    plans = []
    for params, options in zip(req.sampling_params, req.options, strict=True):
        asked = id(params), id(options)
        if asked not in shared:
            shared[asked] = plan_rules(params, options, limits)
        plans.append(shared[asked])
    size = sum(len(plan.user.code) + len(plan.user.params) for plan in plans if plan.user is not None)
    if size > _MOST_CODE_BYTES:
        raise RequestError(
            f"custom_logit_processor and custom_params hold {size} bytes, counted once for each prompt; at most "
            f"{_MOST_CODE_BYTES} are permitted. Send the batch in parts.",
            param="custom_logit_processor",
        )
    return plans


def plan_rules(params: SamplingParams, options: PromptOptions, limits: ModelLimits) -> RulePlan:
    """Raises RequestError."""
    processor, given = options.custom_logit_processor, params.custom_params or {}
    if processor is None and options.max_thinking_tokens is None and not given:
        return NO_RULES
    try:
        plan = _plan(processor, given, params, options, limits)
    except ValueError as error:
        raise RequestError(str(error), param=str(error).partition(" ")[0].partition(".")[0]) from None
    if plan.thinking_tokens is not None:
        _check_can_budget(options, limits)
    return plan


def _plan(
    processor: str | None, given: dict[str, object], params: SamplingParams, options: PromptOptions, limits: ModelLimits
) -> RulePlan:
    most = options.max_thinking_tokens
    if most is not None and not 0 <= most < 2**31:
        raise ValueError(f"max_thinking_tokens must be in [0, {2**31 - 1}], got {most}.")
    if processor is None:
        if given and "thinking_budget" not in given:
            raise ValueError("custom_params is for a custom_logit_processor, and the request has none.")
        name: str | None = names.THINKING_BUDGET
    else:
        name = names.name_of(processor)
    if name == names.THINKING_BUDGET:
        if given or most is None:
            budget = names.thinking_tokens(given)
            most = budget if most is None else most  # as in SGLang
        return RulePlan(thinking_tokens=most)
    if name == names.DISALLOWED_TOKENS:
        room = MAX_LOGIT_BIAS - len(params.logit_bias)
        return RulePlan(most, biases=names.disallowed_tokens(given, room, limits.vocab_size))
    if name == names.NO_REPEAT_NGRAM:
        return RulePlan(most, ngram=names.no_repeat_ngram(given, limits.vocab_size))
    assert processor is not None
    if not limits.runs_user_code:
        raise ValueError(
            "custom_logit_processor may be code only where the server runs with --enable-custom-logit-processor; by name there "
            f"are {', '.join(names.PROCESSOR_NAMES)}."
        )
    return RulePlan(most, user=UserProcessor(names.user_code(processor), names.params_as_json(given)))


def _check_can_budget(options: PromptOptions, limits: ModelLimits) -> None:
    field = "custom_logit_processor" if options.max_thinking_tokens is None else "max_thinking_tokens"
    if limits.reasoning is None:
        why = "this server does not know how the model's thinking ends (--reasoning-parser)"
    elif not limits.makes_text:
        why = "it needs a tokenizer, and this server runs without one (--skip-tokenizer-init)"
    else:
        return
    raise RequestError(f"{field}: a thinking budget is not available: {why}.", param=field)


def rules_of(
    plan: RulePlan, prompt_ids: np.ndarray, reasoning: ReasoningFormat | None, tokenizer: Tokenizer | None, *, is_open: bool
) -> LogitRules | None:
    """`is_open`: the output begins inside thinking, whatever the prompt says."""
    budget = None
    if plan.thinking_tokens is not None:
        assert reasoning is not None and tokenizer is not None, "a budget was planned without knowing of thinking"
        budget = _budget(plan.thinking_tokens, prompt_ids[-_TAIL_TOKENS:].tolist(), reasoning, tokenizer, is_open)
    if budget is None and plan.ngram is None and plan.user is None:
        return None
    return LogitRules(budget, plan.ngram, plan.user)


def _budget(
    num_tokens: int, prompt_tail: list[int], reasoning: ReasoningFormat, tokenizer: Tokenizer, is_open: bool
) -> ThinkingBudget | None:
    """None: the prompt has ended its thinking."""
    tail = tokenizer.decode(prompt_tail, skip_special_tokens=False)
    begins = None if reasoning.begin is None else tag_of(reasoning.begin, tokenizer)
    spent = 0
    if is_open or reasoning.is_open(tail):
        if begins is not None and begins.text in tail:
            thoughts = tail.rpartition(begins.text)[2]
            if reasoning.end not in thoughts:  # else they are of an earlier turn
                spent = _num_tokens(thoughts, begins, prompt_tail, tokenizer)
        begins = None
    elif begins is None or tail.rstrip().endswith(reasoning.end.strip()):
        return None
    return ThinkingBudget(
        num_tokens,
        begins,
        [tag_of(text, tokenizer) for text in (reasoning.end, *reasoning.other_ends)],
        closing=tokenizer.encode(reasoning.closing, add_special_tokens=False),
        closing_behind_newline=tokenizer.encode(reasoning.closing.removeprefix("\n"), add_special_tokens=False),
        spent=spent,
    )


def _num_tokens(thoughts: str, begin: ThinkingTag, prompt_tail: list[int], tokenizer: Tokenizer) -> int:
    """Of the text with which the prompt ends, behind the tag."""
    if begin.token_id in prompt_tail:
        return prompt_tail[::-1].index(begin.token_id)
    return len(tokenizer.encode(thoughts, add_special_tokens=False))
