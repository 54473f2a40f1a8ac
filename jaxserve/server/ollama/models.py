"""GET /api/tags, /api/ps, /api/version, POST /api/show: what Ollama's clients ask about models. There is one, always
loaded, and its LoRA adapters."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from jaxserve.server.http.body import read_struct
from jaxserve.server.http.docs import json_body
from jaxserve.server.ollama.conversation import served_name
from jaxserve.server.ollama.foreign_fields import SHOW
from jaxserve.server.ollama.protocol import OllamaShowRequest
from jaxserve.server.openai.context import OpenAIContext, context_of
from jaxserve.server.openai.params import served_model
from jaxserve.server.requests import RequestError

# Clients ask for it to find out what they may send: this is the version whose fields are served.
OLLAMA_VERSION = "0.12.11"
_NEVER = "9999-12-31T23:59:59Z"

router = APIRouter(tags=["ollama"])
_show_decoder = msgspec.json.Decoder(OllamaShowRequest)


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The served model and its LoRA adapters."""
    context = context_of(request)
    return {"models": [{**entry, "modified_at": _started(context)} for entry in _entries(context)]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, Any]:
    """The same as running."""
    context = context_of(request)
    running = {"expires_at": _NEVER, "size_vram": 0, "context_length": context.service.context_len}
    return {"models": [{**entry, **running} for entry in _entries(context)]}


@router.post("/api/show", openapi_extra=json_body(OllamaShowRequest))
async def show(request: Request) -> dict[str, Any]:
    """What the model can do, and its context length."""
    body, context = await read_struct(request, _show_decoder, SHOW), context_of(request)
    name = body.model or body.name
    if not name:
        raise RequestError("model is required.", param="model")
    model = served_model(served_name(name, context.args), context.args, context.service.lora_adapters)
    family, form = _family(context), context.message_format
    generates, vectors = context.service.limits.generates, context.service.limits.vectors
    capabilities = {
        "completion": generates,
        "tools": generates and form.tools is not None,
        "thinking": generates and form.reasoning is not None,
        "embedding": not generates and vectors is not None and vectors.gives == "embedding",
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(context, model.adapter),
        "model_info": {
            "general.architecture": family,
            "general.basename": family,
            f"{family}.context_length": context.service.context_len,
            f"{family}.vocab_size": context.service.vocab_size,
        },
        "capabilities": [name for name, is_there in capabilities.items() if is_there],
        "modified_at": _started(context),
    }


@router.get("/api/version")
async def version() -> dict[str, str]:
    """The version of Ollama whose API this is."""
    return {"version": OLLAMA_VERSION}


def _entries(context: OpenAIContext) -> list[dict[str, Any]]:
    adapters = context.service.lora_adapters
    return [
        _entry(context, context.args.effective_served_model_name, context.args.model_path, None),
        *(_entry(context, name, path, name) for name, path in adapters.items()),
    ]


def _entry(context: OpenAIContext, name: str, path: str, adapter: str | None) -> dict[str, Any]:
    digest = hashlib.sha256(path.encode()).hexdigest()
    return {"name": name, "model": name, "size": 0, "digest": digest, "details": _details(context, adapter)}


def _details(context: OpenAIContext, adapter: str | None) -> dict[str, Any]:
    family = _family(context)
    return {
        "parent_model": "" if adapter is None else context.args.effective_served_model_name,
        "format": context.args.load_format,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": context.args.quantization or "",
    }


def _family(context: OpenAIContext) -> str:
    """Nothing but a name is known here."""
    return context.args.effective_served_model_name.rstrip("/").rpartition("/")[2] or "model"


def _started(context: OpenAIContext) -> str:
    return datetime.datetime.fromtimestamp(context.started_s, datetime.UTC).isoformat().replace("+00:00", "Z")
