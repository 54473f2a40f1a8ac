"""Chat completions of a model that thinks and calls tools, through the `openai` package: streamed and whole, cut anywhere."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from fake_service import FakeService
from http_harness import MODEL

from jaxserve.config import ServerArgs
from jaxserve.server.http.app import create_app
from jaxserve.types import FinishReason, Thinking

HELLO = [{"role": "user", "content": "hello"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
NOW = {"type": "function", "function": {"name": "now"}}
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen25"}

THOUGHT = "Let me see, 1 < 2.\nSo: add."
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": "é\\n</tool_call>"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WHOLE = f"<think>\n{THOUGHT}\n</think>\n\nI <b>look</b>.\n\n{CALL}\n{SECOND}"


@contextlib.asynccontextmanager
async def openai_client(service: FakeService, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(service, ServerArgs(model_path=MODEL, **{**PARSERS, **options}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        yield openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=http)


async def whole(service: FakeService, client: openai.AsyncOpenAI, texts: list[str], **fields: Any) -> Any:
    service.script = texts
    body = {"model": MODEL, "messages": HELLO, **fields}
    return await client.chat.completions.create(**body)


async def streamed(service: FakeService, client: openai.AsyncOpenAI, texts: list[str], **fields: Any) -> list[Any]:
    service.script = texts
    body = {"model": MODEL, "messages": HELLO, "stream_options": {"include_usage": True}, **fields}
    return [chunk async for chunk in await client.chat.completions.create(stream=True, **body)]


def gathered(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client makes of the deltas of a choice, held to OpenAI's order of them."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    for choice in choices:
        delta = choice.delta
        message["role"] = message["role"] or delta.role
        message["content"] += delta.content or ""
        message["reasoning_content"] += delta.reasoning_content or ""
        for call in delta.tool_calls or []:
            calls = message["tool_calls"]
            if call.index == len(calls):
                assert (call.type, call.function.arguments) == ("function", "")
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert (call.index, call.id, call.type, call.function.name) == (len(calls) - 1, None, None, None)
                assert call.function.arguments
                calls[-1]["arguments"] += call.function.arguments
    return {**message, "finish_reason": choices[-1].finish_reason}


def as_gathered(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "role": message.role,
        "content": message.content or "",
        "reasoning_content": message.reasoning_content or "",
        "tool_calls": [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in message.tool_calls or []
        ],
        "finish_reason": choice.finish_reason,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": call["id"][:5]} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


EXPECTED = {
    "role": "assistant",
    "content": "I <b>look</b>.",
    "reasoning_content": THOUGHT,
    "tool_calls": [
        {"id": "call_", "name": "add", "arguments": '{"x": 1, "y": "é\\n</tool_call>"}'},
        {"id": "call_", "name": "now", "arguments": "{}"},
    ],
    "finish_reason": "tool_calls",
}


async def test_a_message_that_thinks_speaks_and_calls() -> None:
    service = FakeService()
    async with openai_client(service) as client:
        reply = await whole(service, client, [WHOLE], tools=[ADD, NOW])
    assert without_ids(as_gathered(reply.choices[0])) == EXPECTED
    assert reply.choices[0].matched_stop is None
    assert len({call.id for call in reply.choices[0].message.tool_calls}) == 2
    assert service.templated[0]["tools"] == [ADD, NOW]
    assert service.requests[0].sampling_params[0].grammar is None


async def test_however_it_is_cut_it_is_the_same_message() -> None:
    service = FakeService()
    cuts = [[WHOLE[:i], WHOLE[i:]] for i in range(len(WHOLE) + 1)]
    cuts += [["".join(part) for part in itertools.zip_longest(*[iter(WHOLE)] * size, fillvalue="")] for size in (1, 2, 3, 7)]
    async with openai_client(service) as client:
        for texts in cuts:
            chunks = await streamed(service, client, texts, tools=[ADD, NOW])
            assert without_ids(gathered(chunks)) == EXPECTED, texts
            assert chunks[-1].usage.reasoning_tokens == WHOLE.index("</think>") + len("</think>")
            assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == chunks[-1].usage.reasoning_tokens


@pytest.mark.parametrize("end", [5, 20, 60, 75, 100, 130, 150, 165])
async def test_a_message_that_is_cut_off(end: int) -> None:
    """What is there is told, streamed and whole alike."""
    service = FakeService()
    async with openai_client(service) as client:
        reply = await whole(service, client, [WHOLE[:end]], tools=[ADD, NOW])
        chunks = await streamed(service, client, list(WHOLE[:end]), tools=[ADD, NOW])
    assert without_ids(gathered(chunks)) == without_ids(as_gathered(reply.choices[0]))
    assert chunks[-1].usage == reply.usage


async def test_the_clients_own_accumulation() -> None:
    service = FakeService()
    service.script = list(WHOLE)
    async with openai_client(service) as client:
        body = {"model": MODEL, "messages": HELLO, "tools": [{**ADD, "function": {**ADD["function"], "strict": True}}, NOW]}
        async with client.chat.completions.stream(**body) as stream:
            final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == EXPECTED["content"]
    assert [call.function.arguments for call in message.tool_calls] == [c["arguments"] for c in EXPECTED["tool_calls"]]
    assert [call.type for call in message.tool_calls] == ["function"] * 2


async def test_choices_are_parsed_apart() -> None:
    service = FakeService()
    async with openai_client(service) as client:
        chunks = await streamed(service, client, list(WHOLE), tools=[ADD, NOW], n=3)
        assert [without_ids(gathered(chunks, index)) for index in range(3)] == [EXPECTED] * 3
        ids = [call["id"] for index in range(3) for call in gathered(chunks, index)["tool_calls"]]
    assert len(set(ids)) == 6


async def test_the_message_may_come_back_with_the_tools_answer() -> None:
    service = FakeService()
    async with openai_client(service) as client:
        message = (await whole(service, client, [WHOLE], tools=[ADD, NOW])).choices[0].message
        call, now = message.tool_calls
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
            {"role": "tool", "tool_call_id": now.id, "content": ""},
        ]
        await whole(service, client, ["3"], messages=[*HELLO, message, *answers], tools=[ADD, NOW])
    seen = service.templated[-1]["messages"]
    assert seen[1]["reasoning_content"] == THOUGHT
    assert [c["function"]["arguments"] for c in seen[1]["tool_calls"]] == [{"x": 1, "y": "é\n</tool_call>"}, {}]
    assert [answer["tool_call_id"] for answer in seen[2:]] == [call.id, now.id]


async def test_a_message_of_calls_only_has_no_content() -> None:
    service = FakeService()
    async with openai_client(service) as client:
        message = (await whole(service, client, [CALL], tools=[ADD])).choices[0].message
        assert message.content is None
        assert message.reasoning_content is None
        await whole(service, client, ["x"], messages=[*HELLO, message], tools=[ADD])
    assert service.templated[-1]["messages"][1]["content"] == ""


async def test_calls_of_a_message_that_ends_otherwise() -> None:
    """The length and an abort are the reason; only what ended by itself ended for its calls."""
    service = FakeService()
    async with openai_client(service) as client:
        assert (await whole(service, client, [CALL], tools=[ADD])).choices[0].finish_reason == "tool_calls"
        assert (await whole(service, client, ["no call"], tools=[ADD])).choices[0].finish_reason == "stop"
        assert (await whole(service, client, [CALL])).choices[0].finish_reason == "stop"
        assert (await whole(service, client, [CALL], tools=[ADD], tool_choice="none")).choices[0].message.content == CALL
        assert (await whole(service, client, [SECOND], tools=[ADD])).choices[0].message.content == SECOND


# --- thinking


async def test_thinking_that_the_prompt_began() -> None:
    service = FakeService()
    body = {"messages": [{"role": "user", "content": "<think>"}]}
    async with openai_client(service) as client:
        reply = await whole(service, client, ["a", "b</thi", "nk>\n\nc"], **body)
        chunks = await streamed(service, client, ["a", "b</thi", "nk>\n\nc"], **body)
    assert as_gathered(reply.choices[0]) == gathered(chunks)
    assert (reply.choices[0].message.reasoning_content, reply.choices[0].message.content) == ("ab", "c")
    assert reply.usage.reasoning_tokens == chunks[-1].usage.reasoning_tokens == len("ab</think>")


async def test_thinking_may_stay_in_the_text_or_come_at_once() -> None:
    service = FakeService()
    text = f"<think>{THOUGHT}</think>so"
    async with openai_client(service) as client:
        reply = await whole(service, client, [text], extra_body={"separate_reasoning": False})
        assert reply.choices[0].message.content == text
        assert reply.usage.reasoning_tokens == len(text) - 2
        chunks = await streamed(service, client, list(text), extra_body={"stream_reasoning": False})
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert [delta.reasoning_content for delta in deltas if delta.reasoning_content] == [THOUGHT]
        assert gathered(chunks)["content"] == "so"
        cut = await streamed(service, client, list("<think>abc"), extra_body={"stream_reasoning": False})
        assert gathered(cut)["reasoning_content"] == "abc"
    async with openai_client(service, reasoning_parser=None) as client:
        assert (await whole(service, client, [text])).choices[0].message.content == text


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "thinking": True, "enable_thinking": True}),
        ({"reasoning_effort": 0.3}, {"reasoning_effort": 0.3, "thinking": True, "enable_thinking": True}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high", "thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enabled": True}}, {"thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"thinking": False, "enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False, "enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"thinking": True, "enable_thinking": True}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "thinking": False, "enable_thinking": True},
        ),
    ],
)
async def test_whether_to_think_reaches_the_template(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    service = FakeService()
    async with openai_client(service) as client:
        await whole(service, client, ["x"], extra_body=fields)
    names = ("reasoning_effort", "thinking", "enable_thinking")
    assert {name: value for name, value in service.templated[0].items() if name in names} == kwargs


async def test_spaces_between_special_tokens_may_stand_among_the_templates_values() -> None:
    """As SGLang reads them."""
    service = FakeService()
    async with openai_client(service) as client:
        for extra, wanted in (
            ({}, True),
            ({"chat_template_kwargs": {"spaces_between_special_tokens": False}}, False),
            ({"chat_template_kwargs": {"spaces_between_special_tokens": False}, "spaces_between_special_tokens": True}, True),
        ):
            await whole(service, client, ["x"], extra_body=extra)
            assert service.requests[-1].sampling_params[0].spaces_between_special_tokens is wanted


async def test_a_grammar_begins_behind_the_thinking() -> None:
    service = FakeService()
    grammar = {"response_format": {"type": "json_object"}}
    async with openai_client(service) as client:
        for content, thinking in (
            ("hello", Thinking("<think>", "</think>")),  # the model may begin to think
            ("<think>\n", Thinking(None, "</think>")),
            ("<think>\n\n</think>\n\n", None),
        ):
            await whole(service, client, ["x"], messages=[{"role": "user", "content": content}], **grammar)
            assert service.requests[-1].thinking == thinking
        for content, thinking in (("hello", None), ("<think>\n", Thinking(None, "</think>"))):  # what the prompt says is so
            asked = {"messages": [{"role": "user", "content": content}], "reasoning_effort": "none", **grammar}
            await whole(service, client, ["x"], **asked)
            assert service.requests[-1].thinking == thinking
        await whole(service, client, ["x"])
        assert service.requests[-1].thinking is None


# --- what comes with the text


async def test_logprobs_and_token_ids_come_once_each() -> None:
    service = FakeService()
    fields = {"tools": [ADD, NOW], "logprobs": True, "extra_body": {"return_token_ids": True}}
    async with openai_client(service) as client:
        for size in (1, 5, len(WHOLE)):
            texts = [WHOLE[i : i + size] for i in range(0, len(WHOLE), size)]
            chunks = await streamed(service, client, texts, **fields)
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            tokens = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
            assert "".join(tokens) == WHOLE
            ids = [id_ for choice in choices for id_ in choice.model_dump().get("token_ids") or []]
            assert "".join(map(chr, ids)) == WHOLE
            assert without_ids(gathered(chunks)) == EXPECTED


async def test_usage_so_far_and_cached_tokens() -> None:
    service = FakeService()
    async with openai_client(service) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        more = {"return_cached_tokens_details": True}
        chunks = await streamed(service, client, list(WHOLE), tools=[ADD, NOW], stream_options=options, extra_body=more)
        counts = [chunk.usage.reasoning_tokens for chunk in chunks if chunk.choices]
        assert counts == sorted(counts)
        assert counts[-1] == chunks[-1].usage.reasoning_tokens > 0
        assert chunks[-2].model_dump()["sglext"] == {"cached_tokens_details": {"device": 3, "host": 0}}
        reply = await whole(service, client, [WHOLE], extra_body=more)
        assert reply.model_dump()["sglext"] == {"cached_tokens_details": {"device": 3, "host": 0}}
        assert reply.model_dump()["metadata"] == {"weight_version": "v1"}
        assert "sglext" not in (await whole(service, client, [WHOLE])).model_dump()


async def test_a_failure_amid_a_parsed_stream_is_the_clients_exception() -> None:
    service = FakeService()
    service.fail_after = (3, FinishReason.abort("The worker is gone.", 500, "InternalServerError"))
    async with openai_client(service) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[ADD], stream=True)
        chunks = aiter(stream)
        assert [(await anext(chunks)).choices[0].delta.content for _ in range(3)] == ["", "a", "b"]
        with pytest.raises(openai.APIError, match=r"The worker is gone\."):
            await anext(chunks)


# --- which calls


def tag_of(service: FakeService) -> Any:
    grammar = service.requests[-1].sampling_params[0].grammar
    return None if grammar is None else (grammar.kind, json.loads(grammar.text))


async def test_a_forced_call_without_a_parser_is_a_json_array() -> None:
    service = FakeService()
    text = '[{"name": "add", "parameters": {"x": 1}}, {"name": "now", "parameters": {}}]'
    expected = [{"id": "call_", "name": "add", "arguments": '{"x": 1}'}, {"id": "call_", "name": "now", "arguments": "{}"}]
    async with openai_client(service, tool_call_parser=None) as client:
        for texts in ([text], list(text)):
            chunks = await streamed(service, client, texts, tools=[ADD, NOW], tool_choice="required")
            assert without_ids(gathered(chunks)) == {**EXPECTED, "content": "", "reasoning_content": "", "tool_calls": expected}
        kind, tag = tag_of(service)
        assert kind == "structural_tag"
        assert (tag["format"]["begin"], tag["format"]["end"]) == ("[", "]")
        assert tag["format"]["content"]["stop_after_first"] is False
        named = {"type": "function", "function": {"name": "now"}}
        reply = await whole(service, client, ["so [1]"], tools=[ADD, NOW], tool_choice=named, parallel_tool_calls=False)
        assert reply.choices[0].message.content == "so [1]"
        tags = tag_of(service)[1]["format"]["content"]
        assert tags["stop_after_first"] is True
        assert [one["begin"] for one in tags["tags"]] == ['{"name": "now", "parameters": ']
        assert service.templated[-1]["tools"] == [NOW]
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            await whole(service, client, ["x"], tools=[ADD])
        assert caught.value.param == "tools"
        await whole(service, client, ["x"], tools=[ADD], tool_choice="none")
        await whole(service, client, ["x"], tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert [seen["tools"] for seen in service.templated[-2:]] == [None, None]


async def test_what_of_tools_constrains_the_output() -> None:
    service = FakeService()
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    untyped = {"function": {"name": "now"}}
    must = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}

    async def node(**fields: Any) -> Any:
        await whole(service, client, ["x"], **{"tools": [ADD, NOW], **fields})
        tag = tag_of(service)
        return None if tag is None else tag[1]["format"]

    async with openai_client(service) as client:
        assert await node() is None
        assert await node(parallel_tool_calls=True, tool_choice="auto") is None
        for fields, at_least_one, only_one, tools in (
            ({"tools": [strict, NOW]}, False, False, 2),
            ({"tool_choice": "required"}, True, False, 2),
            ({"tool_choice": "required", "parallel_tool_calls": False}, True, True, 2),
            ({"tool_choice": named}, True, False, 1),
            ({"tool_choice": untyped}, True, False, 1),
            ({"parallel_tool_calls": False}, False, True, 2),
            ({"tool_choice": allowed}, False, False, 1),
            ({"tool_choice": must}, True, False, 1),
        ):
            tag = await node(**fields)
            assert (tag["at_least_one"], tag["stop_after_first"], len(tag["tags"])) == (at_least_one, only_one, tools), fields
        assert service.templated[-1]["tools"] == [ADD, NOW]


async def test_tools_beside_another_grammar() -> None:
    """The model calls or answers; if it must call, the grammar of the answer has nothing to say."""
    service = FakeService()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with openai_client(service) as client:
        await whole(service, client, ["{}"], tools=[ADD], response_format=asked)
        calls, answer = tag_of(service)[1]["format"]["elements"]
        lenient = {**schema, "x-guidance": {"lenient": True}}
        assert (calls["at_least_one"], answer) == (True, {"type": "json_schema", "json_schema": lenient})
        for extra, part in (
            ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
            ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
        ):
            await whole(service, client, ["{}"], tools=[ADD], extra_body=extra)
            assert tag_of(service)[1]["format"]["elements"][1] == part
        older = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
        await whole(service, client, ["x"], tools=[ADD], response_format={**older, "at_least_one": True})
        part = tag_of(service)[1]["format"]["elements"][1]
        assert (part["type"], part["triggers"], part["at_least_one"]) == ("triggered_tags", ["<a"], True)
        content = {"type": "json_schema", "json_schema": {}}
        assert part["tags"] == [{"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}]
        with pytest.raises(openai.BadRequestError, match="structural_tag must have a format, or structures"):
            await whole(service, client, ["x"], tools=[ADD], response_format={"type": "structural_tag", "triggers": []})
        await whole(service, client, ["{}"], tools=[ADD], response_format=asked, tool_choice="required")
        assert tag_of(service)[1]["format"]["type"] == "triggered_tags"


async def test_without_grammars_what_needs_one_is_refused_by_name() -> None:
    service = FakeService()
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    async with openai_client(service, grammar_backend="none") as client:
        await whole(service, client, [CALL], tools=[ADD])
        for fields, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [strict]}, "tools"),
            ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ):
            with pytest.raises(openai.BadRequestError, match="--grammar-backend none") as caught:
                await whole(service, client, ["x"], **{"tools": [ADD], **fields})
            assert caught.value.param == param


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object with a name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", 'must be function, got "custom"'),
        ({"tools": function(name="")}, "tools", "an object with a name"),
        ({"tools": function(strict=1)}, "tools", '"f": strict must be true or false, got 1'),
        ({"tools": function(description=[])}, "tools", '"f": description must be a string'),
        (
            {"tools": function(parameters=[])},
            "tools",
            "tools[0].function of \"f\" has an invalid 'parameters' schema: parameters must be a JSON schema, got []",
        ),
        ({"tools": function(parameters={"type": "thing"})}, "tools", "schema: parameters.type must be one of null"),
        (
            {"tools": function(parameters={"properties": {"a": {"items": {"required": True}}}})},
            "tools",
            "parameters.properties.a.items.required must be a list of names, got true",
        ),
        ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice", 'got "maybe"'),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice", "an object with a name"),
        ({"tools": [ADD], "tool_choice": {"type": "custom"}}, "tool_choice", 'got the type "custom"'),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "Tool 'x' not found in tools list",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "a mode and a list of tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "there are no tools"),
    ],
)
async def test_bad_tools_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    service = FakeService()
    async with openai_client(service) as client:
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError) as caught:
                await whole(service, client, ["x"], **fields, **more)
            assert words in caught.value.message
            assert caught.value.param == param
