"""POST /v1/messages and /v1/messages/count_tokens through the `anthropic` package, on a model that says what a script has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import anthropic
import httpx
import pytest
from fake_service import CONTEXT_LEN, FakeService
from http_harness import MODEL, app_client, until
from scripted_server import CALL, MESSAGE, PARSERS, ScriptedServer, cut

from jaxserve.server.requests import RequestError
from jaxserve.types import FinishReason

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "name": "weather",
    "description": "What it is like.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class Server(ScriptedServer):
    def client(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**{"base_url": self.url, "api_key": "k", "max_retries": 0, **options})


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Server]:
    async with Server().running() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    return shared.reset()


async def create(server: Server, **fields: Any) -> anthropic.types.Message:
    async with server.client() as client:
        return await client.messages.create(**{"model": MODEL, "max_tokens": 50, "messages": HELLO, **fields})


async def streamed(server: Server, **fields: Any) -> anthropic.types.Message:
    fields = {"model": MODEL, "max_tokens": 50, "messages": HELLO, **fields}
    async with server.client() as client, client.messages.stream(**fields) as stream:
        return await stream.get_final_message()


async def both(server: Server, **fields: Any) -> anthropic.types.Message:
    """What comes in one piece and what a client puts together from events are one message."""
    whole, collected = await create(server, **fields), await streamed(server, **fields)
    assert _told(whole) == _told(collected)
    return whole


def _told(message: anthropic.types.Message) -> dict[str, Any]:
    told = message.to_dict()
    told.pop("id")
    told.pop("stop_details", None)
    for block in told["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return told


async def test_a_text(server: Server) -> None:
    message = await both(server, max_tokens=3)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", "abc")]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    prompt_tokens = 1 + len("user:hello")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (prompt_tokens - 3, 3)
    assert (message.usage.output_tokens, message.usage.cache_creation_input_tokens) == (3, 0)


async def test_a_stop_sequence(server: Server) -> None:
    message = await both(server, stop_sequences=["x", "d"])
    assert message.content[0].text == "abc"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "d")


async def test_an_end_by_itself_and_one_by_the_context(server: Server) -> None:
    server.service.script = ["Yes", "."]
    message = await both(server)
    assert (message.content[0].text, message.stop_reason) == ("Yes.", "end_turn")
    server.service.script = None
    server.service.fail_after = (4, FinishReason.length_limit(4))
    message = await both(server, max_tokens=10_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert server.service.requests[-1].cuts_new_tokens
    server.service.fail_after = (4, FinishReason.abort("The request was aborted."))
    assert (await both(server)).stop_reason == "pause_turn"


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_thinking_text_and_calls(server: Server, size: int) -> None:
    server.service.script = cut(MESSAGE, size)
    message = await both(server, tools=[WEATHER], max_tokens=300)
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking.strip(), bool(thinking.signature)) == ("thinking", "Hm, Köln.", True)
    assert (text.type, text.text.strip()) == ("text", "I look.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "weather", {"city": "Köln"}),
        ("tool_use", "weather", {"city": "Bonn"}),
    ]
    assert len({call.id for call in calls}) == 2
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


async def test_thinking_may_be_left_out(server: Server) -> None:
    server.service.script = cut(MESSAGE, 5)
    message = await both(server, max_tokens=300, thinking={"type": "adaptive", "display": "omitted"})
    assert [(block.type, block.thinking, bool(block.signature)) for block in message.content[:1]] == [("thinking", "", True)]
    assert message.content[1].text.strip().startswith("I look.")


async def test_a_call_that_is_cut_off(server: Server) -> None:
    server.service.script = [CALL[: CALL.index("ln")], "ln"]
    whole = await create(server, tools=[WEATHER], max_tokens=10)
    assert whole.stop_reason == "max_tokens"
    assert [(block.type, block.input) for block in whole.content] == [("tool_use", {"INVALID_JSON": '{"city": "Kö'})]
    assert (await streamed(server, tools=[WEATHER], max_tokens=10)).content[0].name == "weather"


async def test_a_message_of_nothing_has_an_empty_block(server: Server) -> None:
    server.service.script = [""]
    message = await both(server)
    assert [(block.type, block.text) for block in message.content] == [("text", "")]


async def test_the_events_of_a_stream(server: Server) -> None:
    server.service.script = ["<think>a", "</think>\n\n", "b", CALL]
    fields = {"model": MODEL, "max_tokens": 300, "messages": HELLO, "tools": [WEATHER], "stream": True}
    async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": "k"}) as client:
        reply = await client.post("/v1/messages?beta=true", json=fields, headers={"anthropic-beta": "a-2025-01-01"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [part.split("\n") for part in reply.text.strip().split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in events)
    data = [json.loads(data[6:]) for _, data in events]
    told = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in data]
    assert told[:2] == [("message_start", None, None), ("ping", None, None)]
    blocks = [entry for entry in told if entry[1] is not None]
    assert list(dict.fromkeys(blocks)) == [
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
    ]
    assert told[-2:] == [("message_delta", None, None), ("message_stop", None, None)]
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_a_failure_in_a_stream(server: Server) -> None:
    server.service.fail_after = (3, FinishReason.abort("Ran too long.", 503))
    with pytest.raises(anthropic.APIStatusError, match="Ran too long") as failed:
        await streamed(server)
    assert failed.value.body == {"type": "error", "error": {"type": "overloaded_error", "message": "Ran too long."}}
    with pytest.raises(anthropic.InternalServerError) as failed:
        await create(server)
    assert failed.value.status_code == 503


async def test_errors_in_the_client(server: Server) -> None:
    async def refused(kind: type[anthropic.APIStatusError], **fields: Any) -> Any:
        with pytest.raises(kind) as error:
            await create(server, **fields)
        assert error.value.body["type"] == "error"
        return error.value.body["error"]

    bad = await refused(anthropic.BadRequestError, extra_body={"temperature": -1})
    assert bad["type"] == "invalid_request_error"
    assert bad["message"].startswith("temperature must be")
    assert (await refused(anthropic.NotFoundError, model="other"))["type"] == "not_found_error"
    assert "stop_sequences" in (await refused(anthropic.BadRequestError, stop_sequences=[""] * 40))["message"]
    too_long = await refused(anthropic.BadRequestError, messages=[{"role": "user", "content": "x" * CONTEXT_LEN}])
    assert "tokens" in too_long["message"]
    async with server.client(api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await client.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    assert denied.value.body["error"]["type"] == "authentication_error"


async def test_the_package_lists_the_model(server: Server) -> None:
    async with server.client() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_the_synchronous_client(server: Server) -> None:
    server.service.script = cut(MESSAGE, 4)

    def talk() -> tuple[str, str, Any]:
        with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
            fields: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": HELLO}
            with client.messages.stream(**fields) as stream:
                text = "".join(stream.text_stream)
            whole = client.messages.create(**fields).content[1].text
            return text, whole, client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens

    text, whole, count = await asyncio.to_thread(talk)
    assert text == whole
    assert text.strip().startswith("I look.")
    assert count == 1 + len("user:hello")


async def test_a_client_that_leaves_aborts_its_message(server: Server) -> None:
    server.service.endless, server.service.step_s = True, 0.002
    async with server.client() as client:
        stream = await client.messages.create(model=MODEL, max_tokens=50, messages=HELLO, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        await until(lambda: len(server.service.aborted) == 1)
        waiting = asyncio.create_task(client.messages.create(model=MODEL, max_tokens=50, messages=HELLO))
        await until(lambda: server.service.num_live == 1)
        waiting.cancel()
        await until(lambda: len(server.service.aborted) == 2)
    assert server.service.num_live == 0


async def test_counting_generates_nothing(server: Server) -> None:
    async with server.client() as client:
        count = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.", tools=[WEATHER])
        beta = await client.beta.messages.count_tokens(model=MODEL, messages=HELLO, betas=["context-management-2025-06-27"])
    assert count.input_tokens == 1 + len("system:Be brief.|user:hello")
    assert beta.input_tokens == 1 + len("user:hello")
    assert not server.service.requests


# --- what becomes of a request


async def seen(expect: int = 200, **fields: Any) -> tuple[FakeService, Any]:
    service = FakeService()
    async with app_client(service, **PARSERS) as client:
        body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, **fields}
        reply = await client.post("/v1/messages", json={name: value for name, value in body.items() if value is not ...})
    assert reply.status_code == expect, reply.text
    return service, reply.json()


async def templated(messages: Iterable[Any], **fields: Any) -> Any:
    service, _ = await seen(messages=list(messages), **fields)
    return service.templated[-1]["messages"]


async def refusal(**fields: Any) -> str:
    _, reply = await seen(400, **fields)
    assert reply["error"]["type"] == "invalid_request_error"
    return str(reply["error"]["message"])


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


CACHED = {"cache_control": {"type": "ephemeral"}}


async def test_a_conversation_with_tools() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}, **CACHED}
    messages = await templated(
        [
            user(text("1", **CACHED), text("2")),
            {"role": "user", "content": "3"},
            assistant(
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                text("I "),
                text("look."),
                use,
            ),
            user(
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("wet"), text("hot")], "is_error": False},
                {"type": "tool_result", "tool_use_id": "t2", "content": "sun"},
                {"type": "tool_result", "tool_use_id": "t3"},
                text("and?"),
            ),
        ],
        system=[text("x-anthropic-billing-header: cch=1;"), text("A", **CACHED), text("B")],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    assert messages == [
        {"role": "system", "content": "A\nB"},
        {"role": "user", "content": "1\n2\n3"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "wet\nhot"},
        {"role": "tool", "tool_call_id": "t2", "content": "sun"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "and?"},
    ]


async def test_search_results_and_references_are_text() -> None:
    result = {"type": "search_result", "title": "T", "source": "S", "content": [text("C")]}
    answer = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "weather"}, result],
    }
    messages = await templated([user(result, answer)])
    assert [message["content"] for message in messages] == ["T\nS\nC", "weather\nT\nS\nC"]


async def test_system_messages_amid_the_others() -> None:
    """As Claude Code sends them. A template that has no place for them gets them in the user's turn."""
    later, first = {"role": "system", "content": "later"}, {"role": "system", "content": [text("first")]}
    conversation = [first, first, *HELLO, later, assistant(text("a")), later, *HELLO]
    messages = await templated(conversation, system="top")
    assert messages[0] == {"role": "system", "content": "top\nfirst\nfirst"}
    assert [message["role"] for message in messages[1:]] == ["user", "system", "assistant", "system", "user"]

    class Strict(FakeService):
        def apply_chat_template(self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any) -> list[int]:
            if any(message["role"] == "system" for message in messages[1:]):
                raise RequestError("System message must be at the beginning.", param="messages")
            return super().apply_chat_template(messages, *args, **kwargs)

    class Silent(FakeService):
        def apply_chat_template(self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any) -> list[int]:
            kept = [message for i, message in enumerate(messages) if not i or message["role"] != "system"]
            return super().apply_chat_template(kept, *args, **kwargs)

    for service in (Strict(), Silent()):
        async with app_client(service) as client:
            for _ in range(2):
                body = {"model": MODEL, "max_tokens": 5, "messages": [*HELLO, later]}
                assert (await client.post("/v1/messages", json=body)).status_code == 200
                assert service.templated.pop()["messages"] == [{"role": "user", "content": "hello\nlater"}]
            assert len(service.templated) == isinstance(service, Silent), "tried once"


async def test_billing_lines_are_left_out() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    for system in (f"{line}\nA", [text(line), text("A")]):
        assert (await templated(HELLO, system=system))[0] == {"role": "system", "content": "A"}
    assert [message["role"] for message in await templated(HELLO, system=line)] == ["user"]


async def test_an_answer_that_has_begun_goes_on() -> None:
    service, _ = await seen(messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert service.templated[0]["continue_final_message"]
    assert not service.templated[0]["add_generation_prompt"]


async def test_what_reaches_the_template_and_the_sampler() -> None:
    service, _ = await seen(
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high", "task_budget": {"type": "tokens", "total": 5}},
        tools=[{**WEATHER, **CACHED, "type": "custom", "eager_input_streaming": True, "defer_loading": True}],
        tool_choice={"type": "auto"},
        temperature=0.5,
        top_k=7,
        top_p=0.9,
    )
    (given,), (params,) = service.templated, service.requests[0].sampling_params
    assert (given["enable_thinking"], given["thinking"], given["reasoning_effort"]) == (True, True, "high")
    function = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert given["tools"] == [{"type": "function", "function": function}]
    assert (params.temperature, params.top_k, params.top_p, params.max_new_tokens) == (0.5, 7, 0.9, 5)
    service, _ = await seen(
        thinking={"type": "disabled"}, output_config={"effort": "low"}, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert service.templated[0]["enable_thinking"] is False
    assert service.templated[0]["tools"] is None


async def test_calls_and_schemas_constrain_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    service, _ = await seen(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(service.requests[0].sampling_params[0].json_schema or "") == schema
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto", "disable_parallel_tool_use": True}):
        service, _ = await seen(tools=[WEATHER], tool_choice=choice)
        assert "weather" in (service.requests[0].sampling_params[0].structural_tag or ""), choice


async def test_what_claude_code_sends_is_taken() -> None:
    await seen(
        metadata={"user_id": "user_account_session"},
        service_tier="auto",
        speed="fast",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive"},
        cache_control={"type": "ephemeral"},
        inference_geo="eu",
        mcp_servers=[],
        container=None,
        diagnostics={"previous_message_id": None},
        stop_sequences=[],
        tools=[],
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": ...}, "max_tokens is required."),
        ({"model": ...}, "model is required."),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1."),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be one of user, assistant, system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required."),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name is not a field this server knows."),
        ({"messages": [user(text("a"), {"type": "image"})]}, 'messages[0].content[1] has the type "image"'),
        ({"messages": [user({"type": "document"})]}, 'has the type "document"'),
        ({"messages": [user({"text": "a"})]}, "messages[0].content[0].type must be a string, got null."),
        ({"messages": [user(text("a", extra=1))]}, "messages[0].content[0].extra is not a field"),
        ({"messages": [user(text("a", citations=[{"type": "x"}]))]}, "citations is not supported"),
        ({"messages": [user("a")]}, "messages[0].content[0] must be an object"),
        ({"messages": [user({"type": "tool_use", "id": "a", "name": "b", "input": {}})]}, 'has the type "tool_use"'),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})]},
            'messages[0].content[0].content[0] has the type "image"',
        ),
        ({"messages": [assistant({"type": "server_tool_use"})]}, 'has the type "server_tool_use"'),
        ({"messages": [assistant({"type": "tool_use", "id": "a", "name": "b", "input": "{}"})]}, "input must be an object"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 'the type "web_search_20250305"'),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema must be an object"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget": 1}}, "thinking.budget is not a field"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, '"compact_20260112"'),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"n": 2}, "n is not a field this server knows."),
    ],
)
async def test_what_is_refused_is_named(fields: dict[str, Any], words: str) -> None:
    message = await refusal(**fields)
    assert words in message
    assert message.endswith(".")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_more_pieces_than_the_context_has_tokens(path: str) -> None:
    many = [text("a")] * (CONTEXT_LEN + 1)
    floods = (
        {"messages": HELLO * (CONTEXT_LEN + 1)},
        {"messages": [user(*many)]},
        {"messages": [user({"type": "tool_result", "tool_use_id": "a", "content": many})]},
        {"messages": HELLO, "system": many},
        {"messages": HELLO, "tools": [WEATHER] * (CONTEXT_LEN + 1)},
    )
    async with app_client(FakeService(), **PARSERS) as client:
        for flood in floods:
            limit = {"max_tokens": 1} if path == "/v1/messages" else {}
            reply = await client.post(path, json={"model": MODEL, **limit, **flood})
            assert reply.status_code == 400
            assert "context length" in reply.json()["error"]["message"]
