"""POST /v1/chat/completions: messages through the model's chat template, text out.

    body -> ChatCompletionRequest -> template -> token ids -> GenerateReqInput -> chunks -> one reply, or events

Tools are refused: there is no parser for calls yet, and a call that comes back as text is what no client expects.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.parsers.base import Tool
from jaxserve.parsers.message import MessageParser
from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.openai.collect import Sequence, Usage, gather, matched_stop
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.conversation import Conversation
from jaxserve.server.openai.foreign_fields import CHAT
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.params import (
    check,
    check_model,
    check_stream_options,
    rid_of,
    sampling_params,
)
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.openai.streaming import ChoiceEvents, StreamWriter
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError, new_rid

router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(ChatCompletionRequest)

# By so many last tokens of a prompt a format sees whether the answer begins inside thinking.
_TAIL_TOKENS = 64

# As SGLang's: every delta has reasoning_content, which OpenAI's client offers as an attribute only then; role and content stand
# where they say something.
_ROLE_DELTA = b'"delta":{"role":"assistant","content":"","reasoning_content":null}'
_CONTENT_DELTA = (b'"delta":{"content":', b',"reasoning_content":null}')
_EMPTY_DELTA = b'"delta":{"reasoning_content":null}'


@router.post("/v1/chat/completions", response_class=Response, openapi_extra=json_body(ChatCompletionRequest))
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    context = context_of(request)
    job = await plan(await read_struct(request, _decoder, CHAT), context)
    if job.body.stream:
        stream = functools.partial(context.service.stream, job.generate)
        return EventStream(_Events(job), stream)
    return Response(await unless_disconnected(request.receive, job.reply()), media_type="application/json")


async def plan(body: ChatCompletionRequest, context: OpenAIContext) -> ChatJob:
    args, service = context.args, context.service
    check_model(body.model, args)
    _check(body, args.max_top_logprobs)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens > service.context_len and not args.allow_auto_truncate:
        raise _too_many_tokens(max_tokens, service.context_len)
    defaults = service.generation_defaults if args.sampling_defaults == "model" else {}
    params = sampling_params(body, max_tokens, defaults, service.vocab_size)
    prompt_ids = await _prompt_ids(body, context)
    reply_id = rid_of(body) or f"chatcmpl-{new_rid()}"
    generate = GenerateReqInput(
        input_ids=[prompt_ids],
        sampling_params=[params],
        rids=[reply_id],
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
        priority=body.priority,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
    )
    usage = Usage(params.n, args.enable_cache_report)
    is_open = _begins_in_thinking(prompt_ids, context)
    return ChatJob(body, context, generate, reply_id, int(time.time()), usage, prompt_ids, [], is_open)


@dataclasses.dataclass(frozen=True)
class ChatJob:
    """A checked request and all that shapes its reply."""

    body: ChatCompletionRequest
    context: OpenAIContext
    generate: GenerateReqInput
    reply_id: str
    created_s: int
    usage: Usage
    prompt_ids: list[int]
    tools: list[Tool]  # those that may be called
    is_open: bool  # the prompt ends inside thinking

    def message_parser(self) -> MessageParser:
        """A new one, for one choice."""
        return self.context.message_format.parser(self.tools, is_open=self.is_open)

    async def reply(self) -> bytes:
        chunks = self.context.service.generate(self.generate)
        sequences = await gather(chunks, self.usage)
        return msgspec.json.encode(
            {
                "id": self.reply_id,
                "object": "chat.completion",
                "created": self.created_s,
                "model": self.context.args.effective_served_model_name,
                "choices": [self._choice(index, sequence) for index, sequence in enumerate(sequences)],
                "usage": self.usage.total(),
            }
        )

    def _choice(self, index: int, sequence: Sequence) -> dict[str, Any]:
        body, last = self.body, sequence.last
        assert last is not None, f"choice {index} of {self.reply_id} has no chunks"
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "reasoning_content": None, "tool_calls": None},
            "logprobs": chat_logprobs(sequence.logprobs, self.context.texts) if body.logprobs else None,
            "finish_reason": sequence.finish_reason.type,
            "matched_stop": matched_stop(sequence.finish_reason),
        }
        if body.return_token_ids:
            choice["token_ids"] = sequence.token_ids
        if body.return_token_ids or body.return_prompt_token_ids:
            choice["prompt_token_ids"] = self.prompt_ids
        if body.return_meta_info:
            choice["meta_info"] = _meta_info(last)
        return choice


class _Events(ChoiceEvents):
    """Each choice greets with its role; the text of a chunk comes before the event that says how the choice ended."""

    def __init__(self, job: ChatJob) -> None:
        body, args = job.body, job.context.args
        writer = StreamWriter("chat.completion.chunk", _CONTENT_DELTA, job.reply_id, job.created_s, body, args)
        super().__init__(writer, job.usage, with_ids=bool(body.return_token_ids))
        self._job = job

    def _events(self, chunk: GenerationChunk, is_first: bool) -> Iterator[bytes]:
        job, writer, usage = self._job, self._writer, self._usage
        if is_first:
            prompt = {"prompt_token_ids": job.prompt_ids} if job.body.return_prompt_token_ids else {}
            yield writer.choice(chunk, _ROLE_DELTA, None, None, prompt, usage)
        if chunk.text or chunk.logprobs or (self._with_ids and chunk.token_ids):
            logprobs = chat_logprobs(chunk.logprobs, job.context.texts) if chunk.logprobs else None
            yield writer.choice(chunk, writer.text_fields(chunk.text), logprobs, None, self._ids(chunk), usage)
        if chunk.finish_reason is not None:
            meta = {"meta_info": _meta_info(chunk)} if job.body.return_meta_info else {}
            yield writer.choice(chunk, _EMPTY_DELTA, None, chunk.finish_reason, meta, usage)


def _check(body: ChatCompletionRequest, max_top_logprobs: int) -> None:
    check_stream_options(body)
    for field in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, field)
        check(value is None or value >= 1, field, "at least 1", value)
    if body.top_logprobs is not None:
        check(0 <= body.top_logprobs <= max_top_logprobs, "top_logprobs", f"in [0, {max_top_logprobs}]", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise RequestError(f"top_logprobs={body.top_logprobs} needs logprobs: true.", param="top_logprobs")


def _too_many_tokens(max_tokens: int, context_len: int) -> RequestError:
    return RequestError(
        # SGLang's words, and sglang-jax's.
        f"max_completion_tokens is too large: {max_tokens}. This model supports at most {context_len} completion tokens. "
        f"Requested token count exceeds the model's maximum context length of {context_len} tokens.",
        param="max_completion_tokens",
        code="context_length_exceeded",
    )


async def _prompt_ids(body: ChatCompletionRequest, context: OpenAIContext) -> list[int]:
    conversation = await Conversation.checked(
        context.service,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if conversation.tools is not None:
        raise not_supported(
            "tools",
            "is not supported yet: without a tool-call parser the model's calls would come back as text; "
            'tool_choice "none" answers without tools',
        )
    if body.input_ids is not None:
        check(bool(body.input_ids), "input_ids", "a list of at least one token id", body.input_ids)
        return body.input_ids
    return await conversation.render(context.service)


def _begins_in_thinking(prompt_ids: list[int], context: OpenAIContext) -> bool:
    reasoning = context.message_format.reasoning
    return reasoning is not None and reasoning.is_open(context.service.decode(prompt_ids[-_TAIL_TOKENS:], False))


def _meta_info(last: GenerationChunk) -> dict[str, Any]:
    """SGLang's meta_info of a finished choice."""
    assert last.finish_reason is not None, f"{last.rid} has not ended"
    return {
        "id": last.rid,
        "finish_reason": last.finish_reason.to_dict(),
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "cached_tokens": last.cached_tokens,
        **last.meta,
    }
