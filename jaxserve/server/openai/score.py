"""POST /v1/score: how likely the model finds each of some tokens behind a query and each of its items."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.foreign_fields import OFF, ForeignFields
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.openai.context import context_of
from jaxserve.server.openai.params import served_model
from jaxserve.server.openai.protocol import Int32
from jaxserve.server.scoring import score, score_request


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score."""

    query: str | list[Int32]
    items: str | list[str | list[Int32]]
    label_token_ids: list[Int32]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None


SCORE = ForeignFields(
    dict.fromkeys(
        ("embed_override_token_id", "query_embed_overrides", "item_embed_overrides", "return_pooled_hidden_states"), OFF
    )
)
router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(ScoreRequest)


@router.post("/v1/score", response_class=Response, openapi_extra=json_body(ScoreRequest))
async def v1_score(request: Request) -> Response:
    """Probabilities of tokens behind a query and each of its items, such as those of "yes" and "no"."""
    context = context_of(request)
    body = await read_struct(request, _decoder, SCORE)
    model = served_model(body.model, context.args, context.service.lora_adapters)
    context.service.check_num_sequences(1 if isinstance(body.items, str) else len(body.items), 1)
    wanted = score_request(body.query, body.items, body.label_token_ids, item_first=body.item_first, lora_path=model.adapter)
    work = score(context.service.generate, wanted, apply_softmax=body.apply_softmax)
    result = await unless_disconnected(request.receive, work)
    reply = {
        "scores": result.scores,
        "model": model.name,
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": 0, "total_tokens": result.prompt_tokens},
        "object": "scoring",
    }
    return Response(msgspec.json.encode(reply), media_type="application/json")
