"""POST /api/chat and /api/generate.

    body -> ChatCompletionRequest -> the chat route's plan -> chunks -> MessageParser -> lines of JSON

A raw prompt has neither template nor parser.
"""

from __future__ import annotations

import functools

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.parsers.message import MessageFormat
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.ollama.conversation import chat_request, num_pieces, prompt_request, raw_request, served_name
from jaxserve.server.ollama.foreign_fields import CHAT, GENERATE
from jaxserve.server.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from jaxserve.server.ollama.reply import Lines, Shape, chat_shape, generate_shape
from jaxserve.server.openai.chat import plan
from jaxserve.server.openai.collect import Usage, gather, shaped
from jaxserve.server.openai.constraints import requested_grammar
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.conversation import CHARS_PER_PIECE, check_count
from jaxserve.server.openai.params import ServedModel, sampling_params, served_model
from jaxserve.server.openai.protocol import ChatCompletionRequest
from jaxserve.server.requests import GenerateReqInput, PromptOptions

MEDIA_TYPE = "application/x-ndjson"

router = APIRouter(tags=["ollama"])
_chat_decoder = msgspec.json.Decoder(OllamaChatRequest)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateRequest)


@router.post("/api/chat", response_class=Response, openapi_extra=json_body(OllamaChatRequest))
async def api_chat(request: Request) -> Response:
    """Ollama's chat: a stream of lines, unless `stream` is false."""
    body, context = await read_struct(request, _chat_decoder, CHAT), context_of(request)
    if not body.messages:
        return _loaded(body, context, chat_shape)
    count = num_pieces(body)
    check_count("messages", count, context.service.context_len)  # before anything is done for each of them
    convert = functools.partial(chat_request, body, context.args)
    chat = await context.service.lanes.run(count * CHARS_PER_PIECE, convert)
    return await _chat_answer(request, body, chat, context, chat_shape)


@router.post("/api/generate", response_class=Response, openapi_extra=json_body(OllamaGenerateRequest))
async def api_generate(request: Request) -> Response:
    """Ollama's generation from one prompt: a stream of lines, unless `stream` is false."""
    body, context = await read_struct(request, _generate_decoder, GENERATE), context_of(request)
    if not body.prompt:
        return _loaded(body, context, generate_shape)
    if not body.raw:
        return await _chat_answer(request, body, prompt_request(body, context.args), context, generate_shape)
    lines = Lines(body.model, MessageFormat().parser(), generate_shape, context.texts)
    return await _answer(request, body, _raw(body, body.prompt, context), lines, Usage(1, report_cached=False), context)


def _model(body: OllamaRequest, context: OpenAIContext) -> ServedModel:
    return served_model(served_name(body.model, context.args), context.args, context.service.lora_adapters)


def _raw(body: OllamaGenerateRequest, prompt: str, context: OpenAIContext) -> GenerateReqInput:
    request, service = raw_request(body), context.service
    adapter = _model(body, context).adapter
    params = sampling_params(request, None, context.sampling_defaults, service.vocab_size, grammar=requested_grammar(request))
    options = PromptOptions(return_logprob=bool(body.logprobs), top_logprobs_num=body.top_logprobs or 0, lora_path=adapter)
    return GenerateReqInput(prompts=[prompt], sampling_params=[params], options=[options])


async def _chat_answer(
    request: Request, body: OllamaRequest, chat: ChatCompletionRequest, context: OpenAIContext, shape: Shape
) -> Response:
    job = await plan(chat, context)
    lines = Lines(body.model, job.message_parser(), shape, context.texts)
    return await _answer(request, body, job.generate, lines, job.usage, context)


async def _answer(
    request: Request, body: OllamaRequest, generate: GenerateReqInput, lines: Lines, usage: Usage, context: OpenAIContext
) -> Response:
    generate.sampling_params[0].max_new_tokens, generate.cuts_new_tokens = body.max_tokens, True
    generate.stream = body.stream is not False
    if generate.stream:
        return EventStream(lines, functools.partial(context.service.stream, generate), MEDIA_TYPE)
    sequences = await unless_disconnected(request.receive, gather(context.service.generate(generate), usage))
    reply = await shaped(context.service.lanes, sequences, lambda sequences: lines.whole(sequences[0]))
    return Response(reply, media_type="application/json")


def _loaded(body: OllamaRequest, context: OpenAIContext, shape: Shape) -> Response:
    """Without a message or a prompt a client asks for the model to be loaded, or to be unloaded; it is there anyway."""
    _model(body, context)
    lines = Lines(body.model, MessageFormat().parser(), shape, context.texts)
    return Response(lines.empty("unload" if body.keep_alive == 0 else "load"), media_type="application/json")
