"""The route."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.openai.chat.events import events_of
from jaxserve.server.openai.chat.plan import plan
from jaxserve.server.openai.chat.reply import reply_of
from jaxserve.server.openai.context import context_of
from jaxserve.server.openai.foreign_fields import CHAT, RENDERED_CHAT
from jaxserve.server.openai.protocol import ChatCompletionRequest

router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(ChatCompletionRequest)


@router.post("/v1/chat/completions", response_class=Response, openapi_extra=json_body(ChatCompletionRequest))
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    context = context_of(request)
    job = await plan(await read_struct(request, _decoder, CHAT), context)
    if job.body.stream:
        return EventStream(events_of(job), functools.partial(context.service.stream, job.generate))
    return BlockResponse(await unless_disconnected(request.receive, reply_of(job)))


@router.post("/v1/chat/completions/render", openapi_extra=json_body(ChatCompletionRequest))
async def render(request: Request) -> dict[str, Any]:
    """vLLM's, for routers that know what is cached: the token ids of a chat completion's prompt. Nothing is generated."""
    context = context_of(request)
    job = await plan(await read_struct(request, _decoder, RENDERED_CHAT), context)
    return {"request_id": job.reply_id, "model": job.model, "token_ids": job.prompt_ids}
