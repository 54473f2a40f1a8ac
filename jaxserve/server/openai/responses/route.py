"""The routes."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.foreign_fields import not_supported
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.errors import as_request_error
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.openai.chat import plan
from jaxserve.server.openai.context import context_of
from jaxserve.server.openai.conversation import CHARS_PER_PIECE, check_count
from jaxserve.server.openai.responses.foreign_fields import REQUEST
from jaxserve.server.openai.responses.job import ResponseEvents, ResponseJob
from jaxserve.server.openai.responses.protocol import ResponsesRequest
from jaxserve.server.openai.responses.request import chat_request, new_items, num_pieces
from jaxserve.server.openai.responses.store import Kept, ResponseStore
from jaxserve.server.requests import RequestError

router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.encode


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


@router.post("/v1/responses", response_class=Response, openapi_extra=json_body(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """OpenAI's responses."""
    body, store = await read_struct(request, _decoder, REQUEST), _store_of(request)
    job = await _plan(request, body, store)
    if body.background:
        return _json(_run_in_background(job, store))
    if body.stream:
        return EventStream(ResponseEvents(job), functools.partial(job.chat.context.service.stream, job.chat.generate))
    return _json(_encode(await unless_disconnected(request.receive, job.run())))


@router.get("/v1/responses/{response_id}", response_class=Response)
async def retrieve_response(request: Request, response_id: str) -> Response:
    """A response that is kept, or runs in the background."""
    if request.query_params.get("stream") == "true":
        raise not_supported("stream", "is not supported for a response that is kept")
    return _json(_store_of(request).get(response_id).response)


@router.delete("/v1/responses/{response_id}", response_class=Response)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a response. One that runs is cancelled."""
    store = _store_of(request)
    if (task := store.get(response_id).task) is not None:
        task.cancel()
        await asyncio.wait((task,))
    store.drop(response_id)
    return _json(_encode({"id": response_id, "object": "response", "deleted": True}))


@router.post("/v1/responses/{response_id}/cancel", response_class=Response)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that runs in the background."""
    store = _store_of(request)
    kept = store.get(response_id)
    if kept.task is None:
        raise RequestError(f"The response {response_id!r} does not run in the background.", param="response_id")
    kept.task.cancel()
    await asyncio.wait((kept.task,))
    return _json(store.get(response_id).response)


async def _plan(request: Request, body: ResponsesRequest, store: ResponseStore) -> ResponseJob:
    context, kept = context_of(request), _conversation(body, store)
    items = [*kept, *new_items(body)]
    count = num_pieces(items, body.tools)
    check_count("input", count, context.service.context_len)  # before anything is done for each of them
    convert = functools.partial(chat_request, body, kept, context.inline_system.is_rendered, store.new_id())
    chat = await plan(await context.service.lanes.run(count * CHARS_PER_PIECE, convert), context)
    # As OpenAI's: what the context has no room for is no error.
    chat.generate.sampling_params[0].max_new_tokens, chat.generate.cuts_new_tokens = body.max_output_tokens, True
    return ResponseJob(body, chat, items, store)


def _conversation(body: ResponsesRequest, store: ResponseStore) -> list[dict[str, Any]]:
    if body.previous_response_id is None:
        return []
    kept = store.get(body.previous_response_id, "previous_response_id")
    if kept.items is None:
        message = f"The response {body.previous_response_id!r} has not ended, or not as a whole."
        raise RequestError(message, param="previous_response_id")
    items: list[dict[str, Any]] = msgspec.json.decode(kept.items)
    return items


def _run_in_background(job: ResponseJob, store: ResponseStore) -> bytes:
    store.check_room()
    queued = _encode(job.shape("queued", []))
    store.put(job.id, Kept(queued, None, asyncio.create_task(_run(job, store))))
    return queued


async def _run(job: ResponseJob, store: ResponseStore) -> None:
    """To its end, whatever it is: the store has it then."""
    store.put(job.id, Kept(_encode(job.shape("in_progress", [])), None, asyncio.current_task()))
    try:
        await job.run()
    except asyncio.CancelledError:
        store.put(job.id, Kept(_encode(job.shape("cancelled", job.output.items)), None))
    except Exception as error:
        store.put(job.id, Kept(_encode(job.shape("failed", job.output.items, as_request_error(error))), None))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
