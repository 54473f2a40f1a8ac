"""POST /generate: SGLang's native request and reply.

body -> build_generate_request -> NativeJob -> JSON, or one event per chunk
"""

from __future__ import annotations

import functools

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.config import ServerArgs
from jaxserve.server.http.body import read_json_object
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.http.service import service_of
from jaxserve.server.native.events import NativeEvents
from jaxserve.server.native.job import NativeJob
from jaxserve.server.native.request import build_generate_request

router = APIRouter(tags=["native"])

# For /docs; `build_generate_request` is what checks.
_BODY_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"description": "A prompt or a list of prompts.", "anyOf": [{"type": "string"}, {"type": "array"}]},
        "input_ids": {"description": "Token ids instead of text, of one prompt or of many.", "type": "array"},
        "sampling_params": {"description": "Sampling fields, one object for all prompts or a list.", "type": "object"},
        "rid": {"description": "Request id (a list for many prompts); /abort_request takes it.", "type": "string"},
        "stream": {"type": "boolean", "default": False},
        "return_logprob": {"type": "boolean", "default": False},
        "top_logprobs_num": {"type": "integer", "default": 0},
        "return_text_in_logprobs": {"type": "boolean", "default": False},
        "priority": {"type": "integer"},
        "extra_key": {"type": "string"},
        "cache_salt": {"type": "string"},
    },
    "example": {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}},
}
_DOCS = {"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY_SCHEMA}}}}


@router.post("/generate", response_class=Response, openapi_extra=_DOCS)
@router.put("/generate", response_class=Response, include_in_schema=False)
async def generate(request: Request) -> Response:
    """Generate from one prompt or many. `stream: true` answers with server-sent events."""
    args: ServerArgs = request.app.state.args
    native = build_generate_request(await read_json_object(request), args.preferred_sampling_params)
    service = service_of(request)
    job = NativeJob(native, args, request.app.state.token_texts.__getitem__)
    if native.req.stream:
        stream = functools.partial(service.stream, native.req)
        return EventStream(NativeEvents(job), stream)
    reply = await unless_disconnected(request.receive, job.whole(service.generate(native.req)))
    return Response(msgspec.json.encode(reply), media_type="application/json")
