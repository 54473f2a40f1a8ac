"""/openapi.json and /docs: everything is described, what is said is what is checked, and nothing comes from elsewhere."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from typing import Any
from unittest import mock

import jsonschema
import pytest
from fake_service import LIMITS, FakeService
from http_harness import MODEL, app_client

from jaxserve.config import ServerArgs
from jaxserve.runner import Vectors
from jaxserve.server.http.app import create_app
from jaxserve.server.http.docs_page import page
from jaxserve.server.openai.params import MAX_CHOICES
from jaxserve.types import SamplingParams

SCHEMA = create_app(mock.Mock(), ServerArgs(model_path="model")).openapi()
SCHEMAS = SCHEMA["components"]["schemas"]
OPERATIONS = {(method, path): operation for path, methods in SCHEMA["paths"].items() for method, operation in methods.items()}
PAGE = page(SCHEMA)
_SCORE = Vectors(size=1, gives="scores")
# What the models make that some routes ask.
VECTORS = {
    **dict.fromkeys(("/v1/embeddings", "/encode"), Vectors(size=2, gives="embedding")),
    **dict.fromkeys(("/classify", "/v1/classify", "/v1/rerank", "/v2/rerank", "/rerank"), _SCORE),
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def body_of(operation: dict[str, Any]) -> dict[str, Any]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return SCHEMAS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_the_page_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", PAGE)
    linked = set(re.findall(r"href='?#([^'>]+)", PAGE))
    assert linked
    assert linked == linked & set(re.findall(r"id='([^']+)'", PAGE))


async def test_page_and_description_are_open_though_a_key_is_set() -> None:
    async with app_client(FakeService(), api_key="k", admin_api_key="a") as client:
        shown, described = await client.get("/docs"), await client.get("/openapi.json")
        assert (await client.post("/generate", json={"text": "a"})).status_code == 401
    assert shown.status_code == described.status_code == 200
    assert shown.text == PAGE
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert described.json() == json.loads(json.dumps(SCHEMA))
    assert SCHEMA["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}


def test_operations_say_whether_they_need_the_key() -> None:
    assert "security" not in OPERATIONS["get", "/health"]
    for path in ("/generate", "/v1/chat/completions", "/pause_generation"):
        assert OPERATIONS["post", path]["security"] == [{"key": []}]


def test_every_field_is_described() -> None:
    bodies = {path: body_of(operation) for (_, path), operation in OPERATIONS.items()}
    silent = [
        f"{where}.{name}"
        for where, described in {**SCHEMAS, **bodies}.items()
        for name, field in described.get("properties", {}).items()
        if not field.get("description", "").endswith(".")
    ]
    assert not silent


@pytest.mark.parametrize(("method", "path"), list(OPERATIONS))
async def test_every_route_has_an_example_of_its_body_and_replies_as_it_says(method: str, path: str) -> None:
    operation = OPERATIONS[method, path]
    body = None
    if "requestBody" in operation:
        body = dict(body_of(operation)["example"])
        body |= {"stream": False} if path in ("/api/chat", "/api/generate") else {}
    (media_type, said), *_ = operation["responses"]["200"]["content"].items()
    assert said["schema"] and "example" in said, "it says nothing of its reply"
    jsonschema.validate(said["example"], said["schema"])
    service = FakeService()
    if path in VECTORS:
        service.limits = dataclasses.replace(LIMITS, vectors=VECTORS[path], generates=False)
        service.vectors_of = lambda ids: [0.6] * VECTORS[path].size
    async with app_client(service, reasoning_parser="qwen3", tool_call_parser="qwen25") as client:
        names = {"{model}": MODEL}
        if "{response_id}" in path:
            service.endless = True
            running = await client.post("/v1/responses", json={"input": "x", "background": True})
            names["{response_id}"] = running.json()["id"]
        for name, value in names.items():
            path = path.replace(name, value)
        reply = await client.request(method, path, json=body)
        if "{response_id}" in names:
            await client.delete(f"/v1/responses/{names['{response_id}']}")
    assert service.num_live == 0
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].partition(";")[0] == media_type
    if media_type == "application/json":
        jsonschema.validate(reply.json(), said["schema"])


def test_generate_shows_the_sampling_fields_with_their_defaults() -> None:
    one, many = body_of(OPERATIONS["post", "/generate"])["properties"]["sampling_params"]["anyOf"]
    assert one == many["items"] == {"$ref": "#/components/schemas/SamplingParams"}
    fields = SCHEMAS["SamplingParams"]["properties"]
    assert set(fields) == set(SamplingParams.__struct_fields__)
    defaults = SamplingParams()
    assert {name: field["default"] for name, field in fields.items()} == {
        name: getattr(defaults, name) for name in SamplingParams.__struct_fields__
    }
    for name, field in fields.items():
        assert f"<code>{name}</code>" in PAGE
        assert html.escape(field["description"]) in PAGE


def accepts(**fields: Any) -> bool:
    try:
        SamplingParams(**{"max_new_tokens": 100, **fields}).verify(vocab_size=100_000)
    except ValueError:
        return False
    return True


def test_the_limits_told_are_the_limits_checked() -> None:
    told = 0
    for name, field in SCHEMAS["SamplingParams"]["properties"].items():
        step = 1 if "integer" in json.dumps(field) else 1e-3
        for key, outside in (("minimum", -step), ("maximum", step), ("exclusiveMinimum", 0)):
            if key in field and (name, key) != ("n", "maximum"):  # checked with the request
                told += 1
                assert not accepts(**{name: field[key] + outside}), f"{name} = {field[key] + outside}"
                assert accepts(**{name: field[key] if outside else step}), f"{name} = {field[key]}"
        for key, entries in (("maxItems", lambda n: ["1"] * n), ("maxProperties", lambda n: dict.fromkeys(range(n), 0.0))):
            if key in field:
                told += 1
                one = [1] if name == "stop_token_ids" else None
                assert accepts(**{name: one * field[key] if one else entries(field[key])})
                assert not accepts(**{name: one * (field[key] + 1) if one else entries(field[key] + 1)})
    assert told >= 18


async def test_openai_limits_are_checked_too() -> None:
    assert SCHEMAS["ChatCompletionRequest"]["properties"]["n"]["maximum"] == MAX_CHOICES
    async with app_client(FakeService()) as client:
        for name, field in SCHEMAS["ChatCompletionRequest"]["properties"].items():
            for key, outside in (("minimum", -1), ("maximum", 1)):
                if key in field and abs(field[key]) < 2**31 - 1:
                    reply = await client.post("/v1/chat/completions", json={**CHAT, name: field[key] + outside})
                    assert reply.status_code == 400, f"{name} = {field[key] + outside}"


def test_examples_are_what_their_schemas_take() -> None:
    checked = 0
    for operation in OPERATIONS.values():
        body = body_of(operation)
        if "example" in body:
            jsonschema.validate(body["example"], {**body, "components": SCHEMA["components"]})
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize(
    ("path", "body", "options", "headers", "status"),
    [
        ("/generate", {"text": 5}, {}, {}, 400),
        ("/v1/chat/completions", {}, {}, {}, 400),
        ("/generate", {"text": "a"}, {"api_key": "k"}, {}, 401),
        ("/v1/completions", {"prompt": "a"}, {"api_key": "k"}, {}, 401),
        ("/generate", {"text": "a"}, {}, {"Origin": "https://elsewhere.example"}, 403),
        ("/v1/completions", {"prompt": "a"}, {}, {"Origin": "https://elsewhere.example"}, 403),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, {}, {}, 404),
        ("/tokenize", {"prompt": "a", "model": "other"}, {}, {}, 404),
        ("/generate", {"text": "a" * (1 << 21)}, {"max_body_size_mb": 1}, {}, 413),
        ("/v1/completions", {"prompt": "a" * (1 << 21)}, {"max_body_size_mb": 1}, {}, 413),
    ],
)
async def test_error_replies_are_those_described(
    path: str, body: dict[str, Any], options: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    async with app_client(FakeService(), **options) as client:
        reply = await client.post(path, json=body, headers=headers)
    assert reply.status_code == status, reply.text
    described = OPERATIONS["post", path]["responses"][str(status)]
    name = described["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    example = SCHEMAS[name]["example"]
    assert set(reply.json()) == set(example)
    assert set(reply.json()["error"]) == set(example["error"])
    assert reply.json()["error"]["type"] == described["description"].partition(":")[0]


def test_what_is_not_answered_is_not_described() -> None:
    """FastAPI would say 422 of mistakes that are 400 here."""
    assert all("422" not in operation["responses"] for operation in OPERATIONS.values())
    assert "HTTPValidationError" not in SCHEMAS


async def test_streams_ask_proxies_not_to_buffer() -> None:
    """As docs/operation.md says."""
    async with app_client(FakeService()) as client:
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
            reply = await client.post(path, json={**body, "stream": True})
            assert (reply.headers["x-accel-buffering"], reply.headers["cache-control"]) == ("no", "no-cache")
