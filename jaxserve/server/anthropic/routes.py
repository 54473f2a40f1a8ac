"""POST /v1/messages and /v1/messages/count_tokens.

    body -> MessagesRequest -> ChatCompletionRequest -> the chat route's plan -> chunks -> MessageParser -> blocks

The model's name, its sampling defaults, its template, tools and grammars are the chat route's business; what a message looks
like on the wire is that of this package.
"""

from __future__ import annotations

import functools

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.parsers.pieces import CallBegin
from jaxserve.server.anthropic.conversation import chat_request, num_pieces
from jaxserve.server.anthropic.events import MessageEvents
from jaxserve.server.anthropic.foreign_fields import REQUEST
from jaxserve.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from jaxserve.server.anthropic.reply import content_blocks, final_usage, message, stop_reason
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.openai.chat import ChatJob, plan
from jaxserve.server.openai.collect import gather
from jaxserve.server.openai.context import context_of
from jaxserve.server.openai.conversation import CHARS_PER_PIECE, check_count
from jaxserve.server.openai.params import check
from jaxserve.server.requests import new_rid

router = APIRouter(tags=["anthropic"])
_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


@router.post("/v1/messages", response_class=Response, openapi_extra=json_body(MessagesRequest))
async def messages(request: Request) -> Response:
    """Anthropic's Messages."""
    body = await read_struct(request, _decoder, REQUEST)
    check(body.max_tokens >= 0, "max_tokens", "at least 0", body.max_tokens)
    job = await _plan(request, body, f"msg_{new_rid()}")
    # Clients of this protocol ask for as many as Anthropic's models can write.
    job.generate.sampling_params[0].max_new_tokens, job.generate.cuts_new_tokens = body.max_tokens, True
    if body.thinking is not None and body.thinking.type != "disabled" and job.format.reasoning is not None:
        most = body.thinking.budget_tokens
        check(most is None or most >= 0, "thinking.budget_tokens", "at least 0", most)
        job.generate.options = [msgspec.structs.replace(job.generate.options[0], max_thinking_tokens=most)]
    if body.stream:
        return EventStream(MessageEvents(job, body), functools.partial(job.context.service.stream, job.generate))
    return Response(await unless_disconnected(request.receive, _reply(job, body)), media_type="application/json")


@router.post("/v1/messages/count_tokens", openapi_extra=json_body(CountTokensRequest))
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens the prompt of such a message has. Nothing is generated."""
    body = await read_struct(request, _count_decoder, REQUEST)
    job = await _plan(request, body, None)
    return {"input_tokens": len(job.prompt_ids)}


async def _plan(request: Request, body: CountTokensRequest, rid: str | None) -> ChatJob:
    context = context_of(request)
    count, service = num_pieces(body), context.service
    check_count("messages", count, service.context_len)  # before anything is done for each of them
    convert = functools.partial(chat_request, body, context.inline_system.is_rendered, rid)
    return await plan(await service.lanes.run(count * CHARS_PER_PIECE, convert), context)


async def _reply(job: ChatJob, body: MessagesRequest) -> bytes:
    (sequence,) = await gather(job.context.service.generate(job.generate), job.usage)
    last, parser = sequence.last, job.message_parser()
    assert last is not None, f"{job.reply_id} has no chunks"
    pieces = [*parser.feed(sequence.text), *parser.finish()]
    stop = stop_reason(last, body.max_tokens, has_calls=any(isinstance(piece, CallBegin) for piece in pieces))
    content = content_blocks(pieces, shows_thinking=body.shows_thinking)
    return msgspec.json.encode(message(job.reply_id, body.model, content, stop, final_usage(last, job.usage)))
