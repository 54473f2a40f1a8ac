"""POST /parse_function_call and /separate_reasoning."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import FakeService
from http_harness import app_client

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    'I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
BOTH = {"normal_text": "I look.", "calls": [
    {"tool_index": 1, "name": "now", "parameters": "{}"},
    {"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Paris"}'},
]}  # fmt: skip


async def post(path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
    async with app_client(FakeService(), **options) as client:
        reply = await client.post(path, json=body)
        return reply.status_code, reply.json()


async def test_calls_are_parsed() -> None:
    body = {"text": CALLS, "tools": [WEATHER, NOW], "tool_call_parser": "qwen25"}
    assert await post("/parse_function_call", body) == (200, BOTH)
    del body["tool_call_parser"]
    assert await post("/parse_function_call", body, tool_call_parser="hermes") == (200, BOTH)


async def test_text_without_tools_stays() -> None:
    body = {"text": CALLS, "tool_call_parser": "qwen25"}
    assert await post("/parse_function_call", body) == (200, {"normal_text": CALLS, "calls": []})


@pytest.mark.parametrize(
    ("name", "text"), [("qwen3", "<think>\nHm.\n</think>\n\nParis"), ("deepseek-r1", "Hm.</think>Paris"), ("gpt-oss", (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris<|return|>"
    ))]
)  # fmt: skip
async def test_reasoning_is_separated(name: str, text: str) -> None:
    separate = {"reasoning_text": "Hm.", "text": "Paris"}
    assert await post("/separate_reasoning", {"text": text, "reasoning_parser": name}) == (200, separate)
    assert await post("/separate_reasoning", {"text": text}, reasoning_parser=name) == (200, separate)
    blocks = {
        "reasoning_blocks": ["Hm."],
        "text_blocks": ["Paris"],
        "blocks": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Paris"}],
    }
    body = {"text": text, "reasoning_parser": name, "return_blocks": True}
    assert await post("/separate_reasoning", body) == (200, {**separate, **blocks})


QWEN = {"text": "x", "tool_call_parser": "qwen25"}
NO_SCHEMA = {"function": {"name": "f", "parameters": 5}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "x"}, "tool_call_parser is required: the server was started without --tool-call-parser."),
        ({**QWEN, "tool_call_parser": "qwen26"}, 'qwen25, qwen3_coder, step3, step3p5; got "qwen26".'),
        ({"tool_call_parser": "qwen25"}, "text is required"),
        ({**QWEN, "tools": [{}]}, "tools[0].function must be an object with a name, got null."),
        ({**QWEN, "tools": [NO_SCHEMA]}, "tools[0].function.parameters must be a JSON schema as an object, got 5."),
        ({**QWEN, "tools": [NOW] * 5000}, "tools may hold at most 4096 functions in one request, got 5000."),
        ({**QWEN, "text": "x" * 3_000_000}, "text may hold at most 2097152 characters in one request, got 3000000."),
    ],
)
async def test_what_is_wrong_with_calls(body: dict[str, Any], words: str) -> None:
    status, reply = await post("/parse_function_call", body)
    assert status == 400
    assert words in reply["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "x"}, "reasoning_parser is required: the server was started without --reasoning-parser."),
        ({"text": "x", "reasoning_parser": "x"}, "reasoning_parser must be one of deepseek-r1, "),
        ({"text": "x" * 3_000_000, "reasoning_parser": "qwen3"}, "at most 2097152 characters"),
        ({"text": "x", "reasoning_parser": "qwen3", "n": 1}, "n is not a field"),
    ],
)
async def test_what_is_wrong_with_reasoning(body: dict[str, Any], words: str) -> None:
    status, reply = await post("/separate_reasoning", body)
    assert status == 400
    assert words in reply["error"]["message"]


async def test_schemas_may_be_anything() -> None:
    """They come from users; a parser of bare text looks into them."""
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    odd = [None, True, 5, "s", [], {}, {"type": 5}, {"type": [None, "integer"]}, {"enum": 3}, {"anyOf": {}}, {"$ref": "#/x/y"}]
    for schema in [*odd, {"const": [[[]]]}, {"enum": [{}, None, 1.5]}, {"anyOf": [{"$ref": "#/properties/x"}]}]:
        for parameters in ({"properties": {"x": schema}}, {"properties": schema}, {"properties": {"x": {"anyOf": [schema]}}}):
            body = {
                "text": text,
                "tools": [{"function": {"name": "f", "parameters": parameters}}],
                "tool_call_parser": "qwen3_coder",
            }
            status, reply = await post("/parse_function_call", body)
            assert status == 200
            assert reply["calls"][0]["parameters"] in ('{"x": "1"}', '{"x": 1}')
