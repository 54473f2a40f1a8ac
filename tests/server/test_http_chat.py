"""POST /v1/chat/completions: OpenAI's shapes with SGLang's extensions."""

from __future__ import annotations

import inspect
from typing import Any

import openai.types.chat
import pytest
from fake_service import FakeService
from http_harness import MODEL, app_client, events_of
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions

from jaxserve.server.openai.foreign_fields import CHAT, COMPLETION
from jaxserve.server.openai.protocol import ChatCompletionRequest, CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]


async def chat(service: FakeService | None = None, /, expect: int = 200, options: Any = None, **body: Any) -> Any:
    async with app_client(service or FakeService(), **(options or {})) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3, **body})
    assert reply.status_code == expect, reply.text
    return events_of(reply.text) if expect == 200 and body.get("stream") else reply.json()


async def test_a_reply() -> None:
    reply = await chat(rid="r")
    assert reply["object"] == "chat.completion"
    assert (reply["id"], reply["model"]) == ("r", MODEL)
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc", "reasoning_content": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]
    assert reply["usage"]["prompt_tokens"] == 1 + len("user:hello")


async def test_max_tokens_in_all_forms() -> None:
    service = FakeService()
    await chat(service, max_tokens=None)
    await chat(service, max_tokens=None, max_completion_tokens=4)
    await chat(service, max_tokens=2, max_completion_tokens=5)
    assert [request.sampling_params[0].max_new_tokens for request in service.requests] == [None, 4, 5]


async def test_more_tokens_than_the_context_holds() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        reply = await chat(expect=400, **{"max_tokens": None, field: 101})
        assert "max_completion_tokens is too large: 101. This model supports at most 100 completion tokens" in reply["message"]
        assert reply["code"] == "context_length_exceeded"


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    events = await chat(stream=True)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"content": "a", "reasoning_content": None},
        {"content": "b", "reasoning_content": None},
        {"content": "c", "reasoning_content": None},
        {"reasoning_content": None},
    ]
    keys = {"index", "delta", "logprobs", "finish_reason", "matched_stop"}
    assert all(set(choice) == keys for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "length"]


async def test_no_event_is_forged_by_a_rid() -> None:
    rid = 'a"}\r\n\r\ndata: [DONE]\n\ndata: {'
    events = await chat(stream=True, rid=rid)
    assert {event["id"] for event in events} == {rid}
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    async with app_client(FakeService()) as client:
        reply = await client.post("/generate", json={"text": "a", "rid": rid, "stream": True})
    assert {event["meta_info"]["id"] for event in events_of(reply.text)} == {rid}
    assert not any("DONE" in value for value in reply.headers.values())


async def test_choices_are_interleaved() -> None:
    events = await chat(stream=True, n=2, stop="c")
    assert [event["choices"][0]["index"] for event in events] == [0, 0, 1, 1, 0, 1, 0, 1]
    ends = [event["choices"][0] for event in events if event["choices"][0]["finish_reason"]]
    assert [(end["index"], end["finish_reason"], end["matched_stop"]) for end in ends] == [(0, "stop", "c"), (1, "stop", "c")]
    assert [choice["message"]["content"] for choice in (await chat(n=3))["choices"]] == ["abc"] * 3


async def test_logprobs() -> None:
    content = (await chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c"]
    assert content[0] == {
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "a", "bytes": [97], "logprob": -0.5},
            {"token": "z", "bytes": [122], "logprob": -1.5},
        ],
    }
    streamed = await chat(logprobs=True, stream=True)
    entries = [e["choices"][0]["logprobs"]["content"] for e in streamed if e["choices"][0]["logprobs"]]
    assert [[entry["token"] for entry in one] for one in entries] == [["a"], ["b"], ["c"]]
    assert entries[0][0]["top_logprobs"] == []


async def test_streamed_usage() -> None:
    options = {"enable_cache_report": True}
    events = await chat(stream=True, stream_options={"include_usage": True}, options=options)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(event["usage"] is None for event in events[:-1])
    events = await chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 1, 2, 3, 3, 3]


async def test_sampling_defaults_of_the_model() -> None:
    service = FakeService()
    service.generation_defaults = {"temperature": 0.6, "top_k": -1, "top_p": 0.95}
    await chat(service)
    await chat(service, temperature=0.2)
    await chat(service, options={"sampling_defaults": "openai"})
    params = [request.sampling_params[0] for request in service.requests]
    assert [(p.temperature, p.top_k, p.top_p) for p in params] == [(0.6, -1, 0.95), (0.2, -1, 0.95), (1.0, -1, 1.0)]


async def test_messages_reach_the_template_as_roles_and_texts() -> None:
    service = FakeService()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "add", "arguments": "{x"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "User", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    await chat(service, messages=messages, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    seen = service.templated[0]
    assert seen["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"x": 1}}}, broken],
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    assert seen["tools"] is None
    assert (seen["enable_thinking"], seen["reasoning_effort"]) == (False, "low")
    assert (seen["add_generation_prompt"], seen["continue_final_message"]) == (True, False)


async def test_continue_final_message() -> None:
    service = FakeService()
    await chat(service, messages=[*HELLO, {"role": "assistant", "content": "Well,"}], continue_final_message=True)
    seen = service.templated[0]
    assert (seen["add_generation_prompt"], seen["continue_final_message"]) == (False, True)


async def test_input_ids_replace_the_template() -> None:
    service = FakeService()
    await chat(service, input_ids=[5, 6, 7])
    assert service.requests[0].input_ids == [[5, 6, 7]]
    assert service.templated == []


async def test_token_ids_and_meta_info() -> None:
    choice = (await chat(return_token_ids=True, return_meta_info=True, input_ids=[5], rid="r"))["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98, 99], [5])
    assert choice["meta_info"]["id"] == "r"
    assert choice["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    events = await chat(return_prompt_token_ids=True, return_token_ids=True, return_meta_info=True, input_ids=[5], stream=True)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == [5]
    assert choices[1]["token_ids"] == [97]
    assert choices[-1]["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": None}, "messages", "must be a list"),
        ({"messages": ["hi"]}, "messages", "messages[0] must be an object"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0].role must be one of system"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", 'got "robot"'),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "must be a string or a list of content parts, got 5"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "content[0].text must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            'content[0] has the type "image_url", which is not supported yet',
        ),
        ({"messages": [{"role": "user", "content": "unrenderable"}]}, "messages", "cannot render"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "tool_calls[0].function"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1, got 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "in [0, 20], got 21"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object with a name"),
        ({"tool_choice": "maybe"}, "tool_choice", 'got "maybe"'),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"functions": [{"name": "x"}]}, "functions", "not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"continue_final_message": True}, "continue_final_message", "role assistant"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "must not hold tokenize"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "must not hold self"),
        ({"input_ids": []}, "input_ids", "at least one token id"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens", "budget_tokens is not supported"),
        ({"thinking": {"type": "on"}}, "thinking", 'enabled or disabled, got "on"'),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported yet"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning", 'reasoning.enabled must be true or false, got "yes"'),
        ({"reasoning_effort": "utmost"}, "reasoning_effort", "one of none, minimal"),
        ({"reasoning_effort": 1.5}, "reasoning_effort", "[0, 0.99], got 1.5"),
        ({"sampling_logprobs_mode": "x"}, "sampling_logprobs_mode", "not supported yet"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported yet"),
        ({"web_search_options": {}}, "web_search_options", "not supported yet"),
        ({"verbosity": "low"}, "verbosity", "not supported yet"),
        ({"include_reasoning": False}, "include_reasoning", "not supported yet"),
        ({"temprature": 1}, "temprature", "temprature is not a field this server knows."),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "supported"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x is not a field"),
        ({"messages": [{**HELLO[0], "prefix": True}]}, "messages", "messages[0].prefix is not supported yet"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x", "phase": 1}]}, "messages", "messages[1].phase is not"),
        ({"messages": [{**HELLO[0], "contents": "x"}]}, "messages", "messages[0].contents is not a field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages",
            "messages[0].content[0].x is not a field",
        ),
        ({"user": "u", "max_tokens": "3"}, "max_tokens", 'must be an integer or null, got "3"'),
    ],
)  # fmt: skip
async def test_bad_fields_are_named(body: dict[str, Any], param: str, words: str) -> None:
    error = await chat(expect=400, **body)
    assert words in error["message"]
    assert error["param"] == param


async def test_what_asks_for_nothing_is_accepted() -> None:
    await chat(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k", safety_identifier="s",
        modalities=["text"], verbosity="medium", separate_reasoning=True, stream_reasoning=True, parallel_tool_calls=False,
        reasoning=None, thinking={"type": "disabled"}, function_call="none", routed_dp_rank=0, mm_processor_kwargs={},
        use_audio_in_video=False, custom_labels=None, response_format={"type": "text"}, include_reasoning=True,
    )  # fmt: skip


async def test_the_message_of_a_reply_may_come_back() -> None:
    message = (await chat())["choices"][0]["message"]
    as_the_client_has_it = openai.types.chat.ChatCompletionMessage.model_validate(message).model_dump()
    cached = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    await chat(messages=[*HELLO, message, as_the_client_has_it, {"role": "user", "content": [cached]}])


def test_every_parameter_of_openais_client_is_known() -> None:
    for create, struct, foreign in (
        (Chat.create, ChatCompletionRequest, CHAT),
        (Completions.create, CompletionRequest, COMPLETION),
    ):
        parameters = set(inspect.signature(create).parameters)
        sent = parameters - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        assert sent <= {*struct.__struct_fields__, *foreign.unserved, *foreign.without_effect}
        assert not set(struct.__struct_fields__) & {*foreign.unserved, *foreign.without_effect}


async def test_a_prompt_that_is_too_long() -> None:
    error = await chat(expect=400, messages=[{"role": "user", "content": "x" * 200}], stream=True)
    assert error["code"] == "context_length_exceeded"


async def test_model_names() -> None:
    for name in (None, "", "default", MODEL, "tiny"):
        reply = await chat(model=name, options={"served_model_name": "tiny"})
        assert reply["model"] == "tiny"
    error = await chat(model="gpt-9", expect=404)
    assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "NotFoundError")
    assert '"gpt-9"' in error["message"]


async def test_the_models_list() -> None:
    async with app_client(FakeService(), served_model_name="org/tiny") as client:
        card = (await client.get("/v1/models")).json()["data"][0]
        assert (await client.get("/v1/models/org/tiny")).json() == card
        assert (await client.get("/v1/models/nope")).status_code == 404
    assert (card["id"], card["root"], card["max_model_len"], card["object"]) == ("org/tiny", MODEL, 100, "model")
