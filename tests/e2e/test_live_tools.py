"""Tools, thinking and constrained output through the `openai` package against live servers: what is forced happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from live_server import LiveServer, environment, running

from jaxserve.demo import demo_model_path

MODEL = demo_model_path()
QUESTION = [{"role": "user", "content": "What is jaxserve?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "int", "minimum": 0, "maximum": 99}, "unit": {"enum": ["m", "km"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
SCHEMA = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "x": {"type": "integer", "minimum": 0, "maximum": 99}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
# The thought is over: what is forced begins at once.
UNTHINKING = [*QUESTION, {"role": "assistant", "content": "<think>\n\n</think>"}]
FIELDS: dict[str, Any] = {"model": MODEL, "messages": UNTHINKING, "max_tokens": 400, "temperature": 1.0}


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> Iterator[openai.OpenAI]:
    """A server that knows how its model thinks and calls."""
    options = ["--model-path", MODEL, "--compilation-cache-dir", compilation_cache]
    options += ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25", "--max-total-tokens", "16384"]
    with running(tmp_path_factory.mktemp("parsing") / "server.log", *options, env=environment()) as server:
        yield client_of(server)


@pytest.fixture(scope="module")
def plain(demo_server: LiveServer) -> openai.OpenAI:
    return client_of(demo_server)


def checked(call: Any) -> dict[str, Any]:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert call.function.name == "now"
        assert isinstance(arguments, dict)
    return arguments


def answer(client: openai.OpenAI, **fields: Any) -> Any:
    """One choice, streamed and whole, which must be the same."""
    body = {**FIELDS, "seed": 5, **fields}
    body["extra_body"] = {"continue_final_message": True, **fields.get("extra_body", {})}
    choice = client.chat.completions.create(**body).choices[0]
    if "response_format" in fields:  # the package's helper makes pydantic models of these
        return choice
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == choice.finish_reason
    assert (streamed.message.content or None) == (choice.message.content or None)
    calls, streamed_calls = choice.message.tool_calls or [], streamed.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in streamed_calls]
    assert [call.function.name for call in calls] == [call.function.name for call in streamed_calls]
    return choice


@pytest.mark.parametrize("server", ["plain", "parsing"])
def test_a_named_tool_is_called_with_arguments_of_its_schema(server: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(server)
    named = {"type": "function", "function": {"name": "add"}}
    for seed in range(3):
        choice = answer(client, tools=[ADD, NOW], tool_choice=named, parallel_tool_calls=False, seed=seed)
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.id.startswith("call_")
        assert call.function.name == "add"
        checked(call)


@pytest.mark.parametrize("server", ["plain", "parsing"])
def test_a_required_call_comes_whatever_the_model_likes(server: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(server)
    choice = answer(client, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    [call] = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": str(checked(call)["x"] + 1)}
    follow_up = client.chat.completions.create(
        **{**FIELDS, "messages": [*QUESTION, choice.message, result], "tools": [ADD], "tool_choice": "none", "max_tokens": 5}
    )
    assert follow_up.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("server", ["plain", "parsing"])
def test_of_a_tool_that_is_not_strict_the_grammar_takes_what_it_knows(server: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(server)
    unknown = {"x": {"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 5}}}
    parameters = {**SCHEMA, "properties": {**unknown, "unit": {"enum": ["m", "km"]}}, "if": {"required": ["x"]}}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    [call] = answer(client, tools=[tool], tool_choice="required", parallel_tool_calls=False).message.tool_calls
    assert json.loads(call.function.arguments)["x"] in range(10)
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        answer(client, tools=[{**tool, "function": {**tool["function"], "strict": True}}], tool_choice="required")


def test_whoever_may_call_need_not(parsing: openai.OpenAI) -> None:
    for tools in ([NOW], [ADD]):
        choice = answer(parsing, tools=tools, temperature=0)
        assert choice.message.content
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("server", ["plain", "parsing"])
def test_the_answer_matches_its_format(server: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(server)
    asked = {"type": "json_schema", "json_schema": {"name": "length", "strict": True, "schema": SCHEMA}}
    jsonschema.validate(json.loads(answer(client, response_format=asked).message.content), SCHEMA)
    reply = client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=300, extra_body={"response_format": asked}, best_of=3, temperature=1
    )
    jsonschema.validate(json.loads(reply.choices[0].text), SCHEMA)
    assert answer(client, extra_body={"regex": "(yes|no)"}).message.content in ("yes", "no")
    assert client.completions.create(model=MODEL, prompt="Hi", extra_body={"ebnf": 'root ::= "a" "b"'}).choices[0].text == "ab"
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "fine"}}
    assert answer(client, response_format=tag).message.content == "fine"
    with pytest.raises(openai.BadRequestError, match="response_format and regex cannot be combined"):
        answer(client, response_format=asked, extra_body={"regex": "a"})
    odd = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 5}}
    unknown = {"type": "json_schema", "json_schema": {"name": "x", "schema": odd}}
    assert answer(client, response_format=unknown).message.content.strip() in map(str, range(10))
    unknown["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="not"):
        answer(client, response_format=unknown)


def test_a_format_beside_tools_leaves_both_ways(parsing: openai.OpenAI) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "length", "schema": SCHEMA}}
    ways = set()
    for seed in range(8):
        message = answer(parsing, tools=[ADD], response_format=asked, seed=seed, temperature=3).message
        if message.tool_calls:
            [checked(call) for call in message.tool_calls]
        else:
            jsonschema.validate(json.loads(message.content), SCHEMA)
        ways.add(bool(message.tool_calls))
    assert ways


def test_a_format_does_not_hold_while_the_model_thinks(parsing: openai.OpenAI) -> None:
    thinking = [*QUESTION, {"role": "assistant", "content": "<think>\n"}]
    asked = {"type": "json_schema", "json_schema": {"name": "length", "schema": SCHEMA}}
    extra = {"continue_final_message": True, "ignore_eos": True}
    reply = parsing.chat.completions.create(
        model=MODEL, messages=thinking, max_tokens=4, temperature=0, response_format=asked, extra_body=extra
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].message.model_dump()["reasoning_content"]
    assert reply.usage.model_dump()["reasoning_tokens"] == reply.usage.completion_tokens == 4


def test_what_is_wrong_is_named(plain: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        answer(plain, tools=[ADD])
    with pytest.raises(openai.BadRequestError, match="has no tokens for filling in the middle"):
        plain.completions.create(model=MODEL, prompt="Hi", suffix="x")
