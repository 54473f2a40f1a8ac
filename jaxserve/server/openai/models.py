"""GET /v1/models and /v1/models/{model}: what this server serves (one base model)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.params import check_model

router = APIRouter(tags=["openai"])


def _card(context: OpenAIContext) -> dict[str, Any]:
    return {
        "id": context.args.effective_served_model_name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "jaxserve",
        "root": context.args.model_path,
        "parent": None,
        "max_model_len": context.service.context_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model and its context length."""
    return {"object": "list", "data": [_card(context_of(request))]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """One model; 404 (model_not_found) if it is not served."""
    context = context_of(request)
    check_model(model, context.args)
    return _card(context)
