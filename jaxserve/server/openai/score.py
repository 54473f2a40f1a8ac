"""POST /v1/score and /score: SGLang's scores of a query and its items, and vLLM's of pairs of texts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from jaxserve.server.foreign_fields import OFF, ForeignFields
from jaxserve.server.http.body import read_struct
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.docs import json_body
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.embeddings import WITHOUT_EFFECT
from jaxserve.server.openai.params import ServedModel, adapters_of, check, served_model
from jaxserve.server.openai.protocol import Int32
from jaxserve.server.requests import PromptOptions, RequestError, new_rid
from jaxserve.server.reranking import RerankJob, relevances
from jaxserve.server.scoring import score_items


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score and /score."""

    query: str | list[Int32] | None = None
    items: str | list[str | list[Int32]] | None = None
    label_token_ids: list[Int32 | list[Int32]] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    temperature: float = 1.0
    return_token_logprobs: bool = False
    model: str | None = None
    lora_path: str | None = None
    # vLLM's
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    priority: Int32 | None = None


SCORE = ForeignFields(
    dict.fromkeys(
        ("embed_override_token_id", "query_embed_overrides", "item_embed_overrides", "return_pooled_hidden_states"), OFF
    ),
    WITHOUT_EFFECT,
)
_OF_PAIRS = ("text_1", "text_2", "use_activation", "truncate_prompt_tokens", "priority")
_OF_ITEMS = ("query", "items", "label_token_ids", "apply_softmax", "item_first", "temperature", "return_token_logprobs")
_DEFAULTS = ScoreRequest()
router = APIRouter(tags=["openai"])
_decoder = msgspec.json.Decoder(ScoreRequest)


@router.post("/v1/score", response_class=Response, openapi_extra=json_body(ScoreRequest))
@router.post("/score", response_class=Response, openapi_extra=json_body(ScoreRequest))
async def v1_score(request: Request) -> Response:
    """Of a query and each of its items the probabilities of tokens behind them, such as those of "yes" and "no", or the scores
    of the model's labels; of pairs of texts how well they fit."""
    context = context_of(request)
    body = await read_struct(request, _decoder, SCORE)
    model = served_model(body.model, context.args, context.service.lora_adapters)
    is_pairs = body.text_1 is not None or body.text_2 is not None
    _check_one_form(body, is_pairs)
    work = _of_pairs(body, model, context) if is_pairs else _of_items(body, model, context)
    reply = await unless_disconnected(request.receive, work)
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _check_one_form(body: ScoreRequest, is_pairs: bool) -> None:
    others, those = (_OF_ITEMS, "text_1 and text_2") if is_pairs else (_OF_PAIRS, "query and items")
    for name in others:
        value = getattr(body, name)
        if value and value != getattr(_DEFAULTS, name):
            raise RequestError(f"{name} does not go with {those}.", param=name)


async def _of_items(body: ScoreRequest, model: ServedModel, context: OpenAIContext) -> dict[str, Any]:
    if body.items is not None:
        context.service.check_num_sequences(1 if isinstance(body.items, str) else len(body.items), 1)
    result = await score_items(
        context.service,
        body.query,
        body.items,
        body.label_token_ids,
        apply_softmax=body.apply_softmax,
        item_first=body.item_first,
        temperature=body.temperature,
        return_token_logprobs=body.return_token_logprobs,
        lora_path=adapters_of(body.lora_path, model, 1)[0],
    )
    reply = {
        "scores": result.scores,
        "model": model.name,
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": 0, "total_tokens": result.prompt_tokens},
        "object": "scoring",
    }
    return reply if result.token_logprobs is None else reply | {"token_logprobs": result.token_logprobs}


async def _of_pairs(body: ScoreRequest, model: ServedModel, context: OpenAIContext) -> dict[str, Any]:
    first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if len(first) not in (1, len(second)):
        message = f"text_1 must be one text, or as many as text_2 has ({len(second)}), got {len(first)}."
        raise RequestError(message, param="text_1")
    context.service.check_num_sequences(len(second), 1)
    job = RerankJob(
        queries=first,
        documents=second,
        is_raw=body.use_activation is False,
        options=PromptOptions(lora_path=adapters_of(body.lora_path, model, 1)[0], priority=body.priority),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    got = await relevances(context.service, job)
    return {
        "id": f"score-{new_rid()}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(got.values.tolist())],
        "usage": {"prompt_tokens": got.prompt_tokens, "completion_tokens": 0, "total_tokens": got.prompt_tokens},
    }


def _texts(given: str | list[str] | None, field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    check(bool(texts) and "" not in texts, field, "a text, or a list of texts, of at least one character each", given)
    return texts
