"""POST /tokenize and /detokenize (also below /v1): the served model's tokenizer over HTTP, one text or many."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from jaxserve.server.http.body import read_struct, shown
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.service import service_of
from jaxserve.server.requests import RequestError

router = APIRouter(tags=["tokenizer"])


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize: `prompt` is one text or a list."""

    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize: `tokens` is a list of ids or a list of such lists."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
@router.post("/v1/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """Text to token ids, with their count and the model's context length."""
    body, service = await read_struct(request, _tokenize_decoder), service_of(request)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    # Off the event loop: a long text takes a while, and other requests' tokens should not wait for it.
    encode, special = service.tokenizer.encode, body.add_special_tokens
    ids = await asyncio.to_thread(lambda: [encode(text, add_special_tokens=special) for text in texts])
    counts = [len(one) for one in ids]
    single = isinstance(body.prompt, str)
    return {
        "tokens": ids[0] if single else ids,
        "count": counts[0] if single else counts,
        "max_model_len": service.context_len,
    }


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
@router.post("/v1/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """Token ids to text."""
    body, service = await read_struct(request, _detokenize_decoder), service_of(request)
    single = all(isinstance(item, int) for item in body.tokens)
    lists: list[Any] = [body.tokens] if single else list(body.tokens)
    for ids in lists:
        _check_ids(ids, service.vocab_size)
    texts = await asyncio.to_thread(lambda: [service.decode(ids, body.skip_special_tokens) for ids in lists])
    return {"text": texts[0] if single else texts}


def _check_ids(ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, list):
        raise RequestError("tokens must not mix token ids and lists of token ids.", param="tokens")
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(f"tokens must be token ids in [0, {vocab_size}), got {shown(token_id)}.", param="tokens")
