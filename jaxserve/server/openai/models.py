"""GET /v1/models and /v1/models/{model}: what this server serves, one base model and the LoRA adapters that are loaded."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.params import served_model
from jaxserve.server.vectors import describe_vectors

router = APIRouter(tags=["openai"])


def _card(context: OpenAIContext, adapter: str | None) -> dict[str, Any]:
    """Of the adapter; None: of the base model."""
    base = context.args.effective_served_model_name
    return {
        "id": base if adapter is None else adapter,
        "object": "model",
        "created": context.started_s,
        "owned_by": "jaxserve",
        "root": context.args.model_path if adapter is None else context.service.lora_adapters[adapter],
        "parent": None if adapter is None else base,
        "max_model_len": context.service.context_len,
        "is_generation": context.service.limits.generates,
        "vectors": describe_vectors(context.service.limits.vectors),
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model, then its LoRA adapters, and their context length."""
    context = context_of(request)
    return {"object": "list", "data": [_card(context, one) for one in (None, *context.service.lora_adapters)]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """One model; 404 (model_not_found) if it is not served."""
    context = context_of(request)
    return _card(context, served_model(model, context.args, context.service.lora_adapters).adapter)
