"""POST /generate: SGLang's native request and reply.

body -> build_generate_request -> NativeJob -> JSON, or one event per chunk
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.config import ServerArgs
from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import decode_json_object, read_json_bytes
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import generate_body
from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.http.paced_stream import PacedStream
from jaxserve.server.http.service import GenerationService, service_of
from jaxserve.server.long_json import json_blocks, packed
from jaxserve.server.native.events import NativeEvents
from jaxserve.server.native.input_embeds import FIELD as EMBEDS
from jaxserve.server.native.input_embeds import with_embeds
from jaxserve.server.native.job import NativeJob
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.thinking_tokens import counter_of

router = APIRouter(tags=["native"])

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

# For /docs; `build_generate_request` is what checks.
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _for_each(schema: dict[str, Any]) -> dict[str, Any]:
    """One value for all prompts, or a list with one for each."""
    return {"anyOf": [schema, {"type": "array", "items": schema}]}


_ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
_FIELDS = {
    "text": _TEXTS,
    "input_ids": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}},
    "input_embeds": _for_each(_ROWS),
    "rid": _TEXTS,
    "stream": {"type": "boolean", "default": False},
    "return_logprob": _for_each({"type": "boolean", "default": False}),
    "top_logprobs_num": _for_each({"type": "integer", "default": 0, "minimum": 0}),
    "logprob_start_len": _for_each({"type": "integer", "default": -1}),
    "token_ids_logprob": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
    },
    "return_text_in_logprobs": {"type": "boolean", "default": False},
    "return_prompt_token_ids": {"type": "boolean", "default": False},
    "return_hidden_states": _for_each({"enum": [False, True, "last"], "default": False}),
    "return_routed_experts": _for_each({"type": "boolean", "default": False}),
    "routed_experts_start_len": _for_each({"type": "integer", "default": 0, "minimum": 0}),
    "priority": _for_each({"type": "integer"}),
    "routed_dp_rank": {"type": "integer", "minimum": 0},
    "data_parallel_rank": {"type": "integer", "minimum": 0},
    "extra_key": _TEXTS,
    "cache_salt": _TEXTS,
    "lora_path": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}}]},
    "session_params": _for_each({"$ref": "#/components/schemas/SessionParams"}),
    "require_reasoning": {"type": "boolean", "default": False},
}
_DOCS = generate_body(
    _FIELDS, {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
)


async def _read_body(request: Request, service: GenerationService) -> dict[str, Any]:
    """With what `build_generate_request` takes for input_embeds. Where there may be some, a thread reads them."""
    raw = await read_json_bytes(request)
    if EMBEDS.encode() not in raw:
        return with_embeds(decode_json_object(raw), lambda: service.limits)
    return await service.lanes.run(len(raw), lambda: with_embeds(_leaving_embeds(raw), lambda: service.limits))


def _leaving_embeds(raw: bytes) -> dict[str, Any]:
    """The body, in which input_embeds are JSON still."""
    try:
        fields = _fields.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode_json_object(raw)  # says what is wrong
    embeds = fields.pop(EMBEDS, None)
    body = decode_json_object(msgspec.json.encode(fields))
    return body if embeds is None or bytes(embeds) == b"null" else {**body, EMBEDS: embeds}


@router.post("/generate", response_class=Response, openapi_extra=_DOCS)
@router.put("/generate", response_class=Response, include_in_schema=False)
async def generate(request: Request) -> Response:
    """Generate from one prompt or many. `stream: true` answers with server-sent events."""
    args: ServerArgs = request.app.state.args
    service = service_of(request)
    native = build_generate_request(
        await _read_body(request, service),
        args.preferred_sampling_params,
        service.thinking_end,
        lambda count: service.check_num_sequences(count, 1),
    )
    thinking = counter_of(native.req.thinking, service)
    job = NativeJob(native, args, request.app.state.token_texts.__getitem__, packed, thinking)
    if native.req.stream and job.shows_more:
        return PacedStream(NativeEvents(job), service.generate(native.req), service.lanes)
    if native.req.stream:
        stream = functools.partial(service.stream, native.req)
        return EventStream(NativeEvents(job), stream)
    shape = functools.partial(json_blocks, is_long=job.shows_more)
    work = job.whole(service.generate(native.req), service.lanes, shape)
    return BlockResponse(await unless_disconnected(request.receive, work))
