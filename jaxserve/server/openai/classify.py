"""POST /v1/classify: how probable each of the model's labels is for each text."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.foreign_fields import ForeignFields
from jaxserve.server.http.block_response import BlockResponse
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.long_json import json_blocks
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.embeddings import WITHOUT_EFFECT, TextsRequest, about_texts, usage_of
from jaxserve.server.requests import new_rid
from jaxserve.server.vectors import SCORES, chars_of, check_of_texts, labels_of, pooled, probabilities


class ClassifyRequest(TextsRequest, kw_only=True):
    """POST /v1/classify."""

    use_activation: bool = True  # vLLM's


_CLASSIFY = ForeignFields({}, WITHOUT_EFFECT)
router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(ClassifyRequest)


@router.post("/v1/classify", response_class=Response, openapi_extra=json_body(ClassifyRequest))
async def classify(request: Request) -> Response:
    """The most probable label of each text, and the probabilities of all."""
    context = context_of(request)
    body = await read_struct(request, _decoder, _CLASSIFY)
    return BlockResponse(await unless_disconnected(request.receive, _reply(body, context)))


async def _reply(body: ClassifyRequest, context: OpenAIContext) -> list[bytes]:
    service = context.service
    model, req = about_texts(body, context)
    vectors = service.limits.check_vectors(SCORES)
    check_of_texts(vectors)
    got = await pooled(service.generate, req)
    labels = labels_of(vectors)

    def shape() -> list[bytes]:
        scores = got.matrix()
        values = probabilities(scores, vectors) if body.use_activation else scores
        rows = zip(scores.argmax(axis=1).tolist(), values.tolist(), strict=True)
        data = [
            {"index": i, "label": labels[best], "probs": probs, "num_classes": len(probs)}
            for i, (best, probs) in enumerate(rows)
        ]
        reply: dict[str, Any] = {
            "id": f"classify-{new_rid()}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage_of(got),
        }
        return json_blocks(reply, is_long=len(data) > 1)

    return await service.lanes.run(chars_of(got.num_numbers), shape)
