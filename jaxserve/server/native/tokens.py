"""POST /tokenize and /detokenize (also below /v1): the served model's tokenizer over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request

from jaxserve.server.http.body import read_struct, shown
from jaxserve.server.http.docs import json_body
from jaxserve.server.http.service import GenerationService, service_of
from jaxserve.server.native.sizes import MOST_LISTS, check_size, encode_all, most_together
from jaxserve.server.openai.conversation import Conversation
from jaxserve.server.openai.params import served_model
from jaxserve.server.requests import RequestError

router = APIRouter(tags=["tokenizer"])


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt` is one text or a list; `messages` are rendered as /v1/chat/completions renders them."""

    prompt: str | list[str] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # default: true for prompts; the template writes those of a conversation
    # With messages
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_WITH_MESSAGES = (
    "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "reasoning_effort", "chat_template_kwargs",
)  # fmt: skip


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize: `tokens` is a list of ids or a list of such lists."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
@router.post("/v1/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """Text or a conversation to token ids, with their count and the model's context length."""
    body, service = await read_struct(request, _tokenize_decoder), service_of(request)
    served_model(body.model, request.app.state.args, service.lora_adapters)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Exactly one of prompt and messages must be given.", param="prompt")
    if body.messages is not None:
        tokens: Any = await _conversation_tokens(body, body.messages, service)
        count: Any = len(tokens)
    else:
        tokens = await _prompt_tokens(body, service)
        count = len(tokens) if isinstance(body.prompt, str) else [len(one) for one in tokens]
    return {"tokens": tokens, "count": count, "max_model_len": service.context_len}


async def _conversation_tokens(body: TokenizeRequest, messages: list[dict[str, Any]], service: GenerationService) -> list[int]:
    if body.add_special_tokens:
        message = "add_special_tokens must not be true with messages: the chat template writes the special tokens."
        raise RequestError(message, param="add_special_tokens")
    conversation = await Conversation.checked(
        service,
        messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return await conversation.render(service)


async def _prompt_tokens(body: TokenizeRequest, service: GenerationService) -> Any:
    """The ids of one text, or a list of such lists."""
    for field in _WITH_MESSAGES:
        if getattr(body, field) is not None:
            raise RequestError(f"{field} needs messages instead of a prompt.", param=field)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    ids = await encode_all(service, texts, add_special_tokens=body.add_special_tokens is not False)
    return ids[0] if isinstance(body.prompt, str) else ids


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
@router.post("/v1/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """Token ids to text."""
    body, service = await read_struct(request, _detokenize_decoder), service_of(request)
    served_model(body.model, request.app.state.args, service.lora_adapters)
    single = not body.tokens or isinstance(body.tokens[0], int)
    lists: list[Any] = [body.tokens] if single else list(body.tokens)
    check_size("tokens", "lists of tokens", len(lists), MOST_LISTS)
    num_tokens = sum(len(ids) for ids in lists if isinstance(ids, list))
    check_size("tokens", "tokens", num_tokens, most_together(service))

    def decode() -> list[str]:
        for ids in lists:
            _check_ids(ids, service.vocab_size)
        return [service.decode(ids, body.skip_special_tokens) for ids in lists]

    texts = await service.lanes.run(num_tokens + len(lists), decode)
    return {"text": texts[0] if single else texts}


def _check_ids(ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, list):
        raise RequestError("tokens must not mix token ids and lists of token ids.", param="tokens")
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(f"tokens must be token ids in [0, {vocab_size}), got {shown(token_id)}.", param="tokens")
