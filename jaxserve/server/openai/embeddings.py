"""POST /v1/embeddings: OpenAI's embeddings.

body -> EmbeddingRequest -> GenerateReqInput -> vectors -> one reply, as numbers or as base64 of little-endian float32
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from jaxserve.server.foreign_fields import OFF, ForeignFields
from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.long_json import json_blocks, packed
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.params import adapters_of, count_prompts, served_model, texts_or_ids
from jaxserve.server.openai.protocol import Int32
from jaxserve.server.requests import GenerateReqInput, expanded_rids
from jaxserve.server.routed_rank import rank_of_fields
from jaxserve.server.vectors import (
    Pooled,
    chars_of,
    check_dimensions,
    check_of_texts,
    finished,
    options_of,
    pooled,
    pooling_request,
)


class TextsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What requests about each of some texts share."""

    input: str | list[str | Int32 | list[Int32]]
    model: str | None = None
    # SGLang's extensions
    rid: str | list[str] | None = None
    priority: Int32 | None = None
    lora_path: str | list[str | None] | None = None
    custom_labels: dict[str, str] | None = None
    routed_dp_rank: Int32 | None = None
    data_parallel_rank: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None  # vLLM's


class EmbeddingRequest(TextsRequest, kw_only=True):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None


WITHOUT_EFFECT = {
    "user": "names the end user in OpenAI's records",
    "safety_identifier": "names the end user in OpenAI's records",
}
_EMBEDDING = ForeignFields(dict.fromkeys(("embed_override_token_id", "embed_overrides"), OFF), WITHOUT_EFFECT)
router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(EmbeddingRequest)


@router.post("/v1/embeddings", response_class=Response, openapi_extra=json_body(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings: a vector for each text."""
    context = context_of(request)
    body = await read_struct(request, _decoder, _EMBEDDING)
    return BlockResponse(await unless_disconnected(request.receive, _reply(body, context)))


async def _reply(body: EmbeddingRequest, context: OpenAIContext) -> list[bytes]:
    service = context.service
    model, req = about_texts(body, context)
    vectors = service.limits.check_vectors(("embedding",))
    check_of_texts(vectors)
    check_dimensions(body.dimensions, vectors)
    got = await pooled(service.generate, req)
    is_base64 = body.encoding_format == "base64"

    def shape() -> list[bytes]:
        values = finished(got.matrix(), vectors, body.dimensions)
        write = _base64 if is_base64 else _numbers
        data = [{"object": "embedding", "index": i, "embedding": write(value)} for i, value in enumerate(values)]
        return json_blocks({"object": "list", "data": data, "model": model, "usage": usage_of(got)}, is_long=len(data) > 1)

    return await service.lanes.run(chars_of(got.num_numbers, is_base64=is_base64), shape)


def about_texts(body: TextsRequest, context: OpenAIContext) -> tuple[str, GenerateReqInput]:
    """(the model as the reply names it, the request for the vectors of its texts)"""
    model = served_model(body.model, context.args, context.service.lora_adapters)
    context.service.check_num_sequences(count_prompts(body.input), 1)
    texts, input_ids = texts_or_ids(body.input, "input")
    count = len(texts or input_ids or [])
    return model.name, pooling_request(
        texts=texts,
        input_ids=input_ids,
        rids=expanded_rids(body.rid, count, is_batch=count > 1),
        options=options_of(adapters_of(body.lora_path, model, count), priority=body.priority),
        custom_labels=body.custom_labels,
        data_parallel_rank=rank_of_fields(body.routed_dp_rank, body.data_parallel_rank),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def usage_of(got: Pooled) -> dict[str, int]:
    return {"prompt_tokens": got.prompt_tokens, "total_tokens": got.prompt_tokens, "completion_tokens": 0}


def _numbers(value: np.ndarray) -> Any:
    return packed(value.tolist())


def _base64(value: np.ndarray) -> Any:
    return base64.b64encode(value.astype("<f4").tobytes()).decode()
