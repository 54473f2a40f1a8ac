"""From a chat completion's body to a job: checked, rendered, and ready to be generated."""

from __future__ import annotations

import dataclasses
import time

from jaxserve.parsers.base import Tool
from jaxserve.parsers.message import MessageFormat, MessageParser
from jaxserve.server.openai.chat.calls import call_format, grammar_of_calls
from jaxserve.server.openai.collect import Usage
from jaxserve.server.openai.constraints import requested_grammar
from jaxserve.server.openai.context import OpenAIContext
from jaxserve.server.openai.conversation import Conversation
from jaxserve.server.openai.hidden_states import asked_states
from jaxserve.server.openai.params import adapters_of, check, check_stream_options, rid_of, sampling_params, served_model
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.openai.thinking import thinking_after, wishes_of
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError, new_rid
from jaxserve.server.routed_rank import rank_of_fields
from jaxserve.server.thinking_tokens import counter_of
from jaxserve.types import Grammar, SamplingParams, Thinking

_SPACES = "spaces_between_special_tokens"


@dataclasses.dataclass(frozen=True)
class ChatJob:
    """A checked request and all that shapes its reply."""

    body: ChatCompletionRequest
    context: OpenAIContext
    model: str  # as the reply names it
    generate: GenerateReqInput
    reply_id: str
    created_s: int
    usage: Usage
    prompt_ids: list[int]
    format: MessageFormat
    tools: list[Tool]  # those that may be called
    thinking: Thinking | None  # None: there is none, or none that the server knows

    @property
    def is_parsed(self) -> bool:
        """A message may be more than its text."""
        return bool(self.tools) or (self.format.reasoning is not None and self._separates_reasoning)

    def message_parser(self) -> MessageParser:
        """A new one, for one choice."""
        is_open = self.thinking is not None and self.thinking.begin is None
        return self.format.parser(self.tools, is_open=is_open, separate_reasoning=self._separates_reasoning)

    @property
    def _separates_reasoning(self) -> bool:
        return self.body.separate_reasoning is not False


async def plan(body: ChatCompletionRequest, context: OpenAIContext) -> ChatJob:
    """Raises RequestError."""
    args, service = context.args, context.service
    model = served_model(body.model, args, service.lora_adapters)
    (adapter,) = adapters_of(body.lora_path, model, 1)
    _check(body, args.max_top_logprobs)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens > service.context_len and not args.allow_auto_truncate:
        raise _too_many_tokens(max_tokens, service.context_len)
    conversation = await _conversation(body, context)
    message_format = dataclasses.replace(
        context.message_format, tools=call_format(conversation.tools, context.message_format.tools)
    )
    params = _params(body, max_tokens, conversation, message_format, context)
    prompt_ids = await conversation.render(service) if body.input_ids is None else body.input_ids
    thinking = None
    if message_format.reasoning is not None:
        continued = conversation.continue_final_message
        thinking = thinking_after(prompt_ids, service, message_format.reasoning, continued=continued)
    may_think = thinking is not None and (thinking.begin is None or not conversation.forgoes_thinking)
    is_behind_thinking = params.grammar is not None and may_think and not _covers_thinking(body, message_format, conversation)
    reply_id = rid_of(body) or f"chatcmpl-{new_rid()}"
    generate = GenerateReqInput(
        input_ids=[prompt_ids],
        sampling_params=[params],
        rids=[reply_id],
        options=[
            PromptOptions(
                return_logprob=bool(body.logprobs),
                top_logprobs_num=body.top_logprobs or 0,
                priority=body.priority,
                extra_key=body.extra_key,
                cache_salt=body.cache_salt,
                custom_logit_processor=body.custom_logit_processor,
                return_hidden_states=asked_states(body),
                return_routed_experts=bool(body.return_routed_experts),
                routed_experts_start_len=body.routed_experts_start_len or 0,
                session_params=body.session_params,
                lora_path=adapter,
            )
        ],
        stream=bool(body.stream),
        custom_labels=body.custom_labels,
        data_parallel_rank=rank_of_fields(body.routed_dp_rank, body.data_parallel_rank),
        thinking=thinking if is_behind_thinking else None,
    )
    return ChatJob(
        body,
        context,
        model.name,
        generate,
        reply_id,
        int(time.time()),
        _usage(params.n, thinking, context),
        prompt_ids,
        message_format,
        conversation.tools.callable,
        thinking,
    )


def _check(body: ChatCompletionRequest, max_top_logprobs: int) -> None:
    check_stream_options(body)
    for field in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, field)
        check(value is None or value >= 1, field, "at least 1", value)
    if body.top_logprobs is not None:
        check(0 <= body.top_logprobs <= max_top_logprobs, "top_logprobs", f"in [0, {max_top_logprobs}]", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise RequestError(f"top_logprobs={body.top_logprobs} needs logprobs: true.", param="top_logprobs")
    check(body.input_ids != [], "input_ids", "a list of at least one token id", body.input_ids)


def _too_many_tokens(max_tokens: int, context_len: int) -> RequestError:
    return RequestError(
        # SGLang's words, and sglang-jax's.
        f"max_completion_tokens is too large: {max_tokens}. This model supports at most {context_len} completion tokens. "
        f"Requested token count exceeds the model's maximum context length of {context_len} tokens.",
        param="max_completion_tokens",
        code="context_length_exceeded",
    )


async def _conversation(body: ChatCompletionRequest, context: OpenAIContext) -> Conversation:
    effort, thinking = wishes_of(body)
    return await Conversation.checked(
        context.service,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=effort,
        thinking=thinking,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _params(
    body: ChatCompletionRequest,
    max_tokens: int | None,
    conversation: Conversation,
    message_format: MessageFormat,
    context: OpenAIContext,
) -> SamplingParams:
    args, service = context.args, context.service
    grammar: Grammar | None = requested_grammar(body)
    calls = message_format.tools
    if calls is not None:
        only_one = body.parallel_tool_calls is False
        grammar = grammar_of_calls(conversation.tools, calls, grammar, args, only_one=only_one)
    defaults = dict(context.sampling_defaults)
    spaces = (body.chat_template_kwargs or {}).get(_SPACES)
    if isinstance(spaces, bool):  # SGLang looks for it there
        defaults[_SPACES] = spaces
    keeps = message_format.keeps_special_tokens
    return sampling_params(body, max_tokens, defaults, service.vocab_size, grammar=grammar, keep_special_tokens=keeps)


def _covers_thinking(body: ChatCompletionRequest, message_format: MessageFormat, conversation: Conversation) -> bool:
    """Whether the grammar, one of calls alone, speaks of what the model thinks, too."""
    calls = message_format.tools
    return calls is not None and calls.covers_thinking and (conversation.tools.is_forced or requested_grammar(body) is None)


def _usage(n: int, thinking: Thinking | None, context: OpenAIContext) -> Usage:
    return Usage(n, context.args.enable_cache_report, counter_of(thinking, context.service))
