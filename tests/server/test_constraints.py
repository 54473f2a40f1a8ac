"""response_format and its likes on both routes: what grammar they make, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client

from jaxserve.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROUTES = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}}


async def post(service: FakeService, route: str, **fields: Any) -> Any:
    async with app_client(service) as client:
        return await client.post(route, json={"max_tokens": 3, **ROUTES[route], **fields})


async def grammar_of(route: str, **fields: Any) -> Grammar | None:
    service = FakeService()
    reply = await post(service, route, **fields)
    assert reply.status_code == 200, reply.text
    return service.requests[0].sampling_params[0].grammar


LENIENT = {**SCHEMA, "x-guidance": {"lenient": True}}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a>"],
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema", LENIENT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", LENIENT),
        ({"response_format": LEGACY}, "structural_tag", LEGACY),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"structural_tag": LEGACY}, "structural_tag", LEGACY),
        ({"regex": '"a+"', "response_format": {"type": "text"}}, "regex", "a+"),
    ],
)
async def test_what_the_output_must_match(route: str, fields: dict[str, Any], kind: str, text: Any) -> None:
    grammar = await grammar_of(route, **fields)
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == (kind, text)


@pytest.mark.parametrize("route", ROUTES)
async def test_what_asks_for_no_grammar(route: str) -> None:
    nothing = {"response_format": {"type": "text"}, "regex": "", "ebnf": "", "json_schema": None, "structural_tag": None}
    assert await grammar_of(route, **nothing) is None
    assert await grammar_of(route, response_format={"type": "text"}) is None
    assert await grammar_of(route, ebnf='root ::= "a"') == Grammar("ebnf", 'root ::= "a"')


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {}, "regex": "a", "ebnf": "b"}, "regex", "regex and ebnf cannot be combined"),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "response_format",
            "response_format and regex cannot be combined",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format",
            'one of text, json_object, json_schema, structural_tag, got "xml"',
        ),
        ({"response_format": {"type": ["text"]}}, "response_format", "response_format.type must be one of"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema must be an object with a name and a schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "response_format.json_schema.schema must be a JSON schema, got null",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
            "response_format",
            "name must be",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format",
            "strict must be true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schemas": {}}}},
            "response_format",
            "schemas is not a field",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format",
            "schema is not a field of the type json_object",
        ),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"regex": "a" * (1 << 19)}, "regex", "at most 262144 bytes"),
    ],
)
async def test_bad_formats_are_named(route: str, fields: dict[str, Any], param: str, words: str) -> None:
    reply = await post(FakeService(), route, **fields)
    assert reply.status_code == 400
    assert words in reply.json()["message"]
    assert reply.json()["param"] == param


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("model", "fields", "thinks_before"),
    [
        ("gpt-oss", {"tools": [TOOL], "tool_choice": "required"}, False),
        ("gpt-oss", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ("gpt-oss", {"tools": [STRICT]}, False),
        ("gpt-oss", {"response_format": {"type": "json_object"}}, True),
        ("gpt-oss", {"tools": [TOOL], "response_format": {"type": "json_object"}}, True),
        ("qwen3", {"tools": [TOOL], "tool_choice": "required"}, True),
    ],
)
async def test_whether_a_grammar_waits_for_the_end_of_thinking(model: str, fields: dict[str, Any], thinks_before: bool) -> None:
    """gpt-oss calls amid its thinking, whose end tag never comes then: the grammar of its calls says all of it."""
    service = FakeService()
    options = {"reasoning_parser": model, "tool_call_parser": {"qwen3": "qwen25"}.get(model, model)}
    async with app_client(service, **options) as client:
        reply = await client.post("/v1/chat/completions", json={**ROUTES["/v1/chat/completions"], "max_tokens": 3, **fields})
    assert reply.status_code == 200, reply.text
    assert service.requests[0].sampling_params[0].grammar is not None
    assert (service.requests[0].thinking is not None) == thinks_before
