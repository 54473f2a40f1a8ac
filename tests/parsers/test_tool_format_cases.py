"""What is particular to one tool format: what models get wrong, types from schemas, ids, and what is no call."""

# ruff: noqa: E501 (a case is a line)

from __future__ import annotations

import json
from typing import Any

import pytest
from parser_messages import TOOLS, Tool, cuts, in_order, parse, tool
from spellings import SPELLINGS

from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece
from jaxserve.parsers.tools import TOOL_FORMATS


def call(name: str, arguments: str, count: int = 0, call_id: str | None = None) -> list[Piece]:
    return [CallBegin(count, name, call_id), CallArguments(count, arguments)]


def check(name: str, text: str, expected: list[Piece], tools: list[Tool] = TOOLS) -> None:
    for parts in cuts(text):
        assert in_order(parse(TOOL_FORMATS[name].parser(tools), parts)) == expected


K = '{"key": "k"}'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
GET = call("get", K)
CASES: list[tuple[str, str, list[Piece]]] = [
    # JSON objects
    ("qwen25", f'<tool_call>{{"arguments": {K}, "name": "get"}}</tool_call>', GET),
    ("qwen25", f'<tool_call>{{"id": "7", "type": "function", "name": "get", "arguments": {K}}}</tool_call>', call("get", K, 0, "7")),
    ("qwen25", '<tool_call>{"name": "get", "arguments": "{\\"key\\": \\"k\\"}"}</tool_call>', GET),
    ("qwen25", '<tool_call>{"name": "now", "arguments": null}</tool_call>', call("now", "{}")),
    ("qwen25", '<tool_call>{"name": "now"}</tool_call>', call("now", "{}")),
    ("qwen25", f'<tool_call>{{"name": "g\\u0065t", "parameters": {K}}}</tool_call>', GET),
    ("qwen25", "<tool_call>{'name': 'get', 'arguments': {'key': 'k',},}</tool_call>", GET),
    # what is no call
    ("qwen25", "<tool_call>\n{}</tool_call>", [Content("<tool_call>\n{}</tool_call>")]),
    ("qwen25", "Write <tool_call> before it.", [Content("Write <tool_call> before it.")]),
    ("qwen25", "Text</tool_call> more", [Content("Text</tool_call> more")]),
    ("qwen25", '<tool_call>{"name": "get", "arguments": [1]}', [Content('<tool_call>{"name": "get", "arguments": [1]}')]),
    ("qwen25", '<tool_call>{"name": "get", "arguments": "x"}', [Content('<tool_call>{"name": "get", "arguments": "x"}')]),
    ("qwen25", '<tool_call>{"name": "' + "x" * 600, [Content('<tool_call>{"name": "' + "x" * 600)]),
    # broken behind the name
    ("qwen25", '<tool_call>{"name": "get", "arguments": {"key" 1}}</tool_call> so', [*call("get", '{"key"'), Content("1}}so")]),
    ("qwen25", f'<tool_call>{{"name": "get", "arguments": {K}<tool_call>{{"name": "now"}}', [*GET, *call("now", "{}", 1)]),
    # cut off
    ("qwen25", '<tool_call>{"name": "get", "arguments": {"key": "unclosed', call("get", '{"key": "unclosed')),
    ("qwen25", '<tool_call>{"name": "get", "argum', []),
    ("qwen25", f'<tool_call>{{"name": "get", "arguments": {K}}}\n</tool_', GET),
    # lists
    ("mistral", f'[TOOL_CALLS][{{"name": "get", "arguments": {K}, "id": "abcdefghi"}}]', GET),
    ("mistral", f'[TOOL_CALLS] [{{"id": "a", "name": "get", "arguments": {K}}}] Done.', [*call("get", K, 0, "a"), Content("Done.")]),
    ("mistral", f"[TOOL_CALLS]get[CALL_ID]a1[ARGS]{K}[TOOL_CALLS]now{{}}", [*call("get", K, 0, "a1"), *call("now", "{}", 1)]),
    ("mistral", "[TOOL_CALLS] of Mistral", [Content("[TOOL_CALLS] of Mistral")]),
    ("json_array", f'{{"name": "get", "parameters": {K}}}', GET),
    ("json_array", f'[{{"name": "get", "parameters": {K}}}, {{"name": "x"}}]', [*GET, Content(', {"name": "x"}]')]),
    ("json_array", '["an", "array"]', [Content('["an", "array"]')]),
    # Llama
    ("llama3", f'{{"name": "get", "parameters": {K}}}', GET),
    ("llama3", f'{{"type": "function", "name": "get", "parameters": {K}}}; {{"name": "now"}}', [*GET, *call("now", "{}", 1)]),
    ("llama3", '{"name": "Ada", "age": 36}', [Content('{"name": "Ada", "age": 36}')]),
    ("llama3", '{"na', [Content('{"na')]),
    ("llama3", '<|python_tag|>print("x")', [Content('<|python_tag|>print("x")')]),
    ("llama3", f'text {{"name": "get", "parameters": {K}}}', [Content(f'text {{"name": "get", "parameters": {K}}}')]),
    # DeepSeek
    ("deepseekv3", f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{K}\n```{END}", GET),
    ("deepseekv3", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n{K}<｜tool▁call▁end｜>{END}", GET),
    ("deepseekv31", f"{BEGIN}<｜tool▁call▁begin｜>get<｜tool▁sep｜>{K}{END}", GET),
    (
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now"></｜DSML｜invoke>\n</｜DSML｜function_calls>',
        call("now", "{}"),
    ),
    (
        "deepseekv32",
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="now"/>\n<｜DSML｜invoke name="get">\n{K}\n</｜DSML｜invoke></｜DSML｜function_calls>',
        [*call("now", "{}"), *call("get", K, 1)],
    ),
    # Kimi
    ("kimi_k2", f"<|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{K}<|tool_call_end|>", call("get", K, 0, "functions.get:3")),
    ("kimi_k2", f"<|tool_call_begin|>get<|tool_call_argument_begin|>{K}", GET),
    ("kimi_k2", f"<|tool_call_begin|>get:0 <|tool_call_argument_begin|> {K}", call("get", K, 0, "get:0")),
    # names that begin with a tool's
    ("kimi_k2", f"<|tool_call_begin|>get_x:0<|tool_call_argument_begin|>{K}", [Content(f"<|tool_call_begin|>get_x:0<|tool_call_argument_begin|>{K}")]),
    ("mistral", f"[TOOL_CALLS]get_x[ARGS]{K}", [Content(f"[TOOL_CALLS]get_x[ARGS]{K}")]),
    ("mistral", "[TOOL_CALLS]nownull", [Content("[TOOL_CALLS]nownull")]),
    ("deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>nownull", [Content("<｜tool▁call▁begin｜>function<｜tool▁sep｜>nownull")]),
    ("pythonic", "[get_x(key='k')]", [Content("[get_x(key='k')]")]),
    ("glm45", "<tool_call>get_x</tool_call>", [Content("<tool_call>get_x</tool_call>")]),
    ("qwen3_coder", "<function=get_x></function>", [Content("<function=get_x></function>")]),
    ("minimax-m2", '<minimax:tool_call><invoke name="get_x"/>', [Content('<minimax:tool_call><invoke name="get_x"/>')]),
    # bare text
    ("qwen3_coder", "<function=get>\n<parameter=key>\nk\n</parameter>\n</function>\n</tool_call>", GET),
    ("qwen3_coder", "<tool_call><function=get><parameter=key>k</function></tool_call>", GET),
    ("qwen3_coder", "<tool_call><function=now></function><function=get><parameter=key>k</parameter></function></tool_call>", [*call("now", "{}"), *call("get", K, 1)]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", call("get_weather", '{"city": "A", "days": 2}')),
    ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=key>\n\n x \n\n</parameter>\n</function>", call("get", '{"key": "\\n x \\n"}')),
    ("qwen3_coder", "<tool_call>\n<function=get>\nwhat", [Content("<tool_call>\n<function=get>\nwhat")]),
    ("glm45", "<tool_call>get\n<arg_key>key</arg_key><arg_value>k</arg_value></tool_call>", GET),
    ("glm45", "<tool_call>now</tool_call> So.", [*call("now", "{}"), Content("So.")]),
    ("glm45", "a <tool_call> b", [Content("a <tool_call> b")]),
    # Python
    ("pythonic", "[get(key='k')]", GET),
    ("pythonic", "[get( key = 'k', ), now( )]", [*GET, *call("now", "{}", 1)]),
    ("pythonic", "[get(key=None)] and [get(key=[1, (2,)])]", [*call("get", '{"key": null}'), Content("and"), *call("get", '{"key": [1, [2]]}', 1)]),
    ("pythonic", "a[0], [x](url) and [get]", [Content("a[0], [x](url) and [get]")]),
    ("pythonic", "[get('k')]", [Content("[get('k')]")]),
    ("pythonic", "[get(key=other)]", [*call("get", '{"key": '), Content("other)")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_case(name: str, text: str, expected: list[Piece]) -> None:
    check(name, text, expected)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_call_of_an_unknown_tool_stays_text(name: str) -> None:
    """But for tags around all calls, and white space at these."""
    text = "So: " + SPELLINGS[name]([("unknown", {"key": "k"})])
    expected = text
    for tag in AROUND:
        expected = expected.replace(tag, "")
    for parts in cuts(text):
        (content,) = in_order(parse(TOOL_FORMATS[name.partition("/")[0]].parser(TOOLS), parts))
        assert isinstance(content, Content)
        assert "".join(content.text.split()) == "".join(expected.split())


AROUND = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|python_start|>", "<|python_end|>",
)  # fmt: skip


ODD_SCHEMAS: list[Any] = [
    True, None, 5, {}, {"type": 5}, {"enum": []}, {"enum": [5, "a"]}, {"enum": "a"}, {"type": "string", "enum": [None]},
    {"$ref": "#/$defs/none"}, {"anyOf": 5}, {"type": "string", "enum": ["a", "b"]},
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("at_least_one", [True, False])
def test_a_grammar_follows_from_any_schema(name: str, at_least_one: bool) -> None:
    """What a schema may be is checked elsewhere; `true` is one."""
    odd = [None, {}, {"properties": 5}, {"properties": {}, "required": 5}, {"required": ["x"]}]
    for parameters in [*odd, *({"properties": {"x": schema}, "required": ["x"]} for schema in ODD_SCHEMAS)]:
        one = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        tag = TOOL_FORMATS[name].structural_tag([one], at_least_one=at_least_one, stop_after_first=False)
        assert '"elements": []' not in json.dumps(tag), "an empty choice matches nothing"


TYPED: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({}, "5", "5"),
    (None, "5", "5"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "-5.5e1", -55.0),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    ({"type": "null"}, "None", None),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "integer"]}, "x5", "x5"),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"const": 3}, "3", 3),
    ({"$ref": "#/$defs/count"}, "4", 4),
    ({"type": "object"}, "{" * 5000, "{" * 5000),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax-m2", "step3"])
def test_bare_text_has_the_type_of_the_schema(name: str, schema: Any, text: str, value: Any) -> None:
    one = tool("f", **({"x": schema} if schema is not None else {}))
    one["function"]["parameters"]["$defs"] = {"count": {"type": "integer"}}
    pieces = parse(TOOL_FORMATS[name].parser([one]), [SPELLINGS[name]([("f", {"x": text})])])
    assert json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments))) == {"x": value}
