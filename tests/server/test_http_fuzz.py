"""Whatever stands in a field: the answer is a reply or a 4xx that says why, never a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client, error_message

from jaxserve.scheduler.control.start_profile import ProfileReq
from jaxserve.server.anthropic import foreign_fields as anthropic
from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.native.parsing import ParseFunctionCallRequest, SeparateReasoningRequest
from jaxserve.server.native.tokens import TokenizeRequest
from jaxserve.server.ollama import foreign_fields as ollama
from jaxserve.server.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from jaxserve.server.openai.foreign_fields import CHAT, COMPLETION
from jaxserve.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.server.openai.responses import foreign_fields as responses
from jaxserve.server.openai.responses.protocol import ResponsesRequest
from jaxserve.types import SamplingParams

NATIVE_FIELDS = (
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "top_logprobs_num", "return_text_in_logprobs",
    "logprob_start_len", "priority", "extra_key", "cache_salt", "stream",
)  # fmt: skip
TARGETS = {
    "/generate": ({"text": "x"}, NATIVE_FIELDS),
    "/v1/completions": ({"prompt": "x"}, (*CompletionRequest.__struct_fields__, *COMPLETION.unserved)),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x"}]},
        (*ChatCompletionRequest.__struct_fields__, *CHAT.unserved, *CHAT.without_effect),
    ),
    "/v1/responses": ({"input": "x"}, (*ResponsesRequest.__struct_fields__, *responses.REQUEST.unserved)),
    "/v1/messages": (
        {"model": "default", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
        (*MessagesRequest.__struct_fields__, *anthropic.REQUEST.unserved, *anthropic.REQUEST.without_effect),
    ),
    "/api/chat": (
        {"model": "default", "messages": [{"role": "user", "content": "x"}]},
        (*OllamaChatRequest.__struct_fields__, *ollama.CHAT.without_effect),
    ),
    "/api/generate": (
        {"model": "default", "prompt": "x"},
        (*OllamaGenerateRequest.__struct_fields__, *ollama.GENERATE.unserved),
    ),
    "/api/show": ({"model": "default"}, (*OllamaShowRequest.__struct_fields__, *ollama.SHOW.without_effect)),
    "/tokenize": ({"prompt": "x"}, TokenizeRequest.__struct_fields__),
    "/detokenize": ({"tokens": [5]}, ("tokens", "skip_special_tokens")),
    "/parse_function_call": ({"text": "x", "tool_call_parser": "glm45"}, ParseFunctionCallRequest.__struct_fields__),
    "/separate_reasoning": ({"text": "x", "reasoning_parser": "qwen3"}, SeparateReasoningRequest.__struct_fields__),
    "/set_internal_state": ({"server_args": {}}, ("server_args",)),
    "/slow_down": ({}, ("forward_sleep_time",)),
    "/start_profile": ({}, ProfileReq.__struct_fields__),
    "/abort_request": ({"rid": "x"}, ("rid", "abort_all")),
}
NUM_BODIES = 150


def any_value(rng: random.Random, depth: int = 0) -> Any:
    leaves = [
        None, True, False, 0, 1, -1, 3, 2**31, -(2**63), 2**63, 10**30, 0.5, -0.0, 1e300, "", "a", "5", "ü\u0000😀", "default",
    ]  # fmt: skip
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(leaves)
    values = [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if rng.random() < 0.5:
        return values
    names = [
        "type",
        "role",
        "input",
        "tool_use_id",
        "id",
        "tool_calls",
        "arguments",
        "content",
        "text",
        "function",
        "name",
        "n",
        "stop",
        "5",
        "max_new_tokens",
        "temperature",
    ]
    return {rng.choice(names): value for value in values}


@pytest.mark.parametrize("path", TARGETS)
async def test_no_body_is_a_server_error(path: str) -> None:
    start, fields = TARGETS[path]
    rng = random.Random(path)
    statuses = set()
    async with app_client(FakeService()) as client:
        for _ in range(NUM_BODIES):
            body = {**start, **{rng.choice(fields): any_value(rng) for _ in range(rng.randint(1, 2))}}
            reply = await client.post(path, content=dumps(body), headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400, 404), (body, reply.text)
            if reply.status_code != 200:
                assert len(error_message(reply)) > 10, body
            statuses.add(reply.status_code)
    assert {200, 400} <= statuses


BLOCKS = (
    {"type": "text", "text": "a"},
    {"type": "thinking", "thinking": "a", "signature": "s"},
    {"type": "tool_use", "id": "a", "name": "b", "input": {"c": 1}},
    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a"}]},
    {"type": "search_result", "title": "a", "source": "b", "content": [{"type": "text", "text": "a"}]},
)
CALL = {"id": "a", "function": {"name": "b", "arguments": {"c": 1}}}


def almost(value: Any, rng: random.Random) -> Any:
    """The value with something in it changed, or nothing."""
    if rng.random() < 0.05:
        return any_value(rng)
    if isinstance(value, dict):
        return {name: almost(part, rng) for name, part in value.items() if rng.random() > 0.02}
    return [almost(part, rng) for part in value] if isinstance(value, list) else value


ITEMS = (
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "reasoning", "id": "a", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a"}]},
)


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/v1/responses"])
async def test_no_message_is_a_server_error(path: str) -> None:
    rng = random.Random(path)
    statuses = set()
    async with app_client(FakeService()) as client:
        for _ in range(NUM_BODIES):
            message: dict[str, Any] = {"role": rng.choice(("user", "assistant"))}
            if path == "/api/chat":
                message |= {"content": "a", "thinking": "b", "tool_calls": [CALL]}
            else:
                message["content"] = rng.choices(BLOCKS, k=rng.randint(1, 3))
            body = {"model": "default", "messages": almost([message], rng)}
            if path == "/v1/messages":
                body["max_tokens"] = 5
            if path == "/v1/responses":
                body = {"input": almost(rng.choices(ITEMS, k=rng.randint(1, 3)), rng)}
            reply = await client.post(path, content=dumps(body), headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400), (body, reply.text)
            if reply.status_code == 400:
                assert len(error_message(reply)) > 10
            statuses.add(reply.status_code)
    assert statuses == {200, 400}


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
async def test_no_sampling_field_is_a_server_error(field: str) -> None:
    rng = random.Random(field)
    async with app_client(FakeService()) as client:
        for _ in range(30):
            body = {"text": "x", "sampling_params": {field: any_value(rng)}}
            reply = await client.post("/generate", content=dumps(body), headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400), (body, reply.text)


def dumps(body: Any) -> bytes:
    return json.dumps(body).encode()
