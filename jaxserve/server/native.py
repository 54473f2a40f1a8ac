"""POST /generate: SGLang's native request and reply.

    body -> build_generate_request -> GenerateReqInput -> chunks -> GenerateReply -> JSON, or one event per chunk

A streamed event repeats everything so far, as SGLang's does, unless --incremental-streaming-output asks for what is new; the
events of a list request say by `index` which sequence they belong to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.config import ServerArgs
from jaxserve.server.body import read_json_object
from jaxserve.server.connection import DONE_EVENT, EventStream, event, unless_disconnected
from jaxserve.server.errors import raise_if_failed
from jaxserve.server.native_input import NativeRequest, build_generate_request
from jaxserve.server.replies import GenerateReply
from jaxserve.server.service import GenerationService, service_of
from jaxserve.server.token_texts import TokenTexts

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
    job = _Job(native, service_of(request), args, request.app.state.token_texts)
    if native.req.stream:
        return EventStream(job.events())
    return Response(await unless_disconnected(request, job.whole()), media_type="application/json")


@dataclasses.dataclass(frozen=True)
class _Job:
    native: NativeRequest
    service: GenerationService
    args: ServerArgs
    texts: TokenTexts

    def _reply(self, index: int, with_index: bool) -> GenerateReply:
        req = self.native.req
        return GenerateReply(
            weight_version=self.args.weight_version,
            return_logprob=req.return_logprob,
            top_logprobs_num=req.top_logprobs_num,
            token_text=self.texts.__getitem__ if self.native.return_text_in_logprobs else None,
            index=index if with_index else None,
        )

    async def _chunks(self, replies: dict[int, GenerateReply], with_index: bool) -> AsyncGenerator[GenerateReply, None]:
        """The reply that has just grown, again and again. They come into being with their first chunk: before it, nobody
        has checked how many sequences were asked for."""
        chunks = self.service.generate(self.native.req)
        async with aclosing(chunks):
            async for chunk in chunks:
                raise_if_failed(chunk)
                reply = replies.get(chunk.index)
                if reply is None:
                    reply = replies[chunk.index] = self._reply(chunk.index, with_index)
                reply.add(chunk)
                yield reply

    async def whole(self) -> bytes:
        replies: dict[int, GenerateReply] = {}
        async with aclosing(self._chunks(replies, with_index=False)) as grown:
            async for _ in grown:
                pass
        shaped = [replies[index].to_dict() for index in sorted(replies)]
        return msgspec.json.encode(shaped if self.native.is_list else shaped[0])

    async def events(self) -> AsyncGenerator[bytes, None]:
        incremental = self.args.incremental_streaming_output
        async with aclosing(self._chunks({}, with_index=self.native.is_list)) as grown:
            async for reply in grown:
                yield event(msgspec.json.encode(reply.delta_dict() if incremental else reply.to_dict()))
        yield DONE_EVENT
