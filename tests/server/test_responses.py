"""/v1/responses through the `openai` package, on a model that says what a script has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from fake_service import CONTEXT_LEN, FakeService
from http_harness import MODEL, app_client, until
from openai.types.responses import Response
from scripted_server import CALL, MESSAGE, PARSERS, ScriptedServer, cut

from jaxserve.server.elsewhere import AnsweredElsewhere, Place
from jaxserve.server.openai.responses.store import Kept, ResponseStore
from jaxserve.server.requests import RequestError
from jaxserve.types import FinishReason

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class Server(ScriptedServer):
    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="k", max_retries=0)


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Server]:
    async with Server().running(max_stored_responses=4) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    return shared.reset()


async def create(server: Server, **fields: Any) -> Response:
    return await server.client.responses.create(**{"model": MODEL, "input": "hello", **fields})


async def both(server: Server, **fields: Any) -> Response:
    """The reply in one piece; the last event of a stream has the same."""
    whole = await create(server, **fields)
    events = [event async for event in await create(server, stream=True, **fields)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert _told(events[-1].response.to_dict()) == _told(whole.to_dict())
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in events[-1].response.output]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    return whole


def _told(value: Any) -> Any:
    """Without ids and times."""
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if name not in ("id", "call_id", "created_at", "completed_at")}
        return {name: _told(part) for name, part in kept.items()}
    return [_told(part) for part in value] if isinstance(value, list) else value


async def test_a_text(server: Server) -> None:
    response = await both(server, max_output_tokens=3, metadata={"a": "b"})
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", MODEL, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.output_text, response.output[0].status) == ("abc", "incomplete")
    assert response.metadata == {"a": "b"}
    tokens = 1 + len("user:hello")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (tokens, 3, tokens + 3)
    assert response.usage.input_tokens_details.cached_tokens == 3
    server.service.script = ["Yes."]
    assert (await both(server)).status == "completed"


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_thinking_text_and_calls(server: Server, size: int) -> None:
    server.service.script = cut(MESSAGE, size)
    response = await both(server, tools=[WEATHER])
    thinking, text, *calls = response.output
    assert (thinking.type, thinking.content[0].text.strip()) == ("reasoning", "Hm, Köln.")
    assert (text.type, text.content[0].text.strip()) == ("message", "I look.")
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "weather", {"city": "Köln"}),
        ("function_call", "weather", {"city": "Bonn"}),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in response.output} == {"completed"}
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


async def test_a_conversation_goes_on(server: Server) -> None:
    server.service.script = [MESSAGE]
    first = await create(server, tools=[WEATHER], instructions="Be brief.")
    answers = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
        for item in first.output
        if item.type == "function_call"
    ]
    server.service.script = ["Sun."]
    second = await create(server, input=answers, previous_response_id=first.id, tools=[WEATHER])
    third = await create(server, input="And?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    messages = server.service.templated[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert messages[1]["reasoning_content"].strip() == "Hm, Köln."
    assert [call["id"] for call in messages[1]["tool_calls"]] == [message["tool_call_id"] for message in messages[2:4]]
    assert server.service.templated[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    # The same, sent as items.
    items = [{"role": "user", "content": "hello"}, *first.to_dict()["output"], *answers, *second.to_dict()["output"]]
    await create(server, input=[*items, {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}], store=False)
    assert server.service.templated[-1]["messages"] == messages


async def test_functions_in_namespaces(server: Server) -> None:
    server.service.script = [CALL]
    space = {"type": "namespace", "name": "now", "description": "What is.", "tools": [WEATHER]}
    response = await both(server, tools=[space, {**WEATHER, "name": "other"}])
    (call,) = response.output
    assert (call.name, call.namespace) == ("weather", "now")
    assert [tool["function"]["name"] for tool in server.service.templated[-1]["tools"]] == ["weather", "other"]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    again = await create(server, input=[{"role": "user", "content": "hello"}, call.to_dict(), answer], tools=[space])
    assert again.output[0].namespace == "now"


async def test_messages_of_developers() -> None:
    """As Codex sends them."""
    later = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "later"}]}
    first = {**later, "content": [{"type": "input_text", "text": "first"}]}
    user = {"role": "user", "content": "hello"}
    service, _ = await seen(instructions="top", input=[first, first, user, later, user])
    assert service.templated[-1]["messages"] == [
        {"role": "system", "content": "top\nfirst\nfirst"},
        user,
        {"role": "system", "content": "later"},
        user,
    ]


async def test_what_is_kept(server: Server) -> None:
    server.service.script = ["Yes."]
    client = server.client
    response = await create(server)
    assert _told((await client.responses.retrieve(response.id)).to_dict()) == _told(response.to_dict())
    unstored = await create(server, store=False)
    assert not unstored.to_dict()["store"]
    for lost in (unstored.id, "resp_other"):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve(lost)
        assert missing.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(server, previous_response_id=lost)
        assert missing.value.param == "previous_response_id"
    for ask in (create(server, previous_response_id="other"), client.responses.retrieve("other")):
        with pytest.raises(openai.BadRequestError, match="begin with resp_"):
            await ask
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    kept = [await create(server) for _ in range(5)]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(kept[0].id)
    assert (await client.responses.retrieve(kept[1].id)).id == kept[1].id


async def test_in_the_background(server: Server) -> None:
    server.service.script, server.service.step_s = ["Yes", "."], 0.2
    client = server.client
    response = await create(server, background=True)
    assert (response.status, response.output) == ("queued", [])
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await create(server, previous_response_id=response.id)
    while response.status in ("queued", "in_progress"):
        response = await client.responses.retrieve(response.id)
    assert (response.status, response.output_text, response.background) == ("completed", "Yes.", True)
    with pytest.raises(openai.BadRequestError, match="does not run"):
        await client.responses.cancel(response.id)
    server.service.script, server.service.endless, server.service.step_s = None, True, 0.002
    running = [await create(server, background=True) for _ in range(4)]
    with pytest.raises(openai.InternalServerError, match="run in the background"):
        await create(server, background=True)
    assert (await client.responses.cancel(running[0].id)).status == "cancelled"
    await until(lambda: len(server.service.aborted) == 1)
    for response in running[1:]:
        await client.responses.delete(response.id)
    await until(lambda: server.service.num_live == 0)
    server.service.endless, server.service.crash = False, RequestError("The queue is full.", 503)
    response = await create(server, background=True)
    while response.status in ("queued", "in_progress"):
        response = await client.responses.retrieve(response.id)
    assert (response.status, response.error.message) == ("failed", "The queue is full.")


async def test_a_failure_in_a_stream(server: Server) -> None:
    server.service.fail_after = (3, FinishReason.abort("Ran too long.", 503))
    *_, error, failed = [event async for event in await create(server, stream=True)]
    assert (error.type, error.message, error.code) == ("error", "Ran too long.", "503")
    assert (failed.type, failed.response.status, failed.response.output[0].type) == ("response.failed", "failed", "message")
    assert failed.response.error.message == "Ran too long."
    with pytest.raises(openai.InternalServerError, match="Ran too long"):
        await create(server)


async def test_a_client_that_leaves_aborts_its_response(server: Server) -> None:
    server.service.endless, server.service.step_s = True, 0.002
    stream = await create(server, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: len(server.service.aborted) == 1)
    waiting = asyncio.create_task(create(server))
    await until(lambda: server.service.num_live == 1)
    waiting.cancel()
    await until(lambda: len(server.service.aborted) == 2)
    assert server.service.num_live == 0


async def test_logprobs_and_formats(server: Server) -> None:
    response = await both(server, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=2)
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["a", "b"]
    assert [entry.token for entry in logprobs[1].top_logprobs] == ["b", "z"]

    class Answer(pydantic.BaseModel):
        n: int

    server.service.script = ['{"n": 3}']
    parsed = await server.client.responses.parse(model=MODEL, input="hello", text_format=Answer)
    assert parsed.output_parsed == Answer(n=3)
    assert json.loads(server.service.requests[-1].sampling_params[0].json_schema or "")["required"] == ["n"]


async def test_the_synchronous_client_and_its_stream_helper(server: Server) -> None:
    server.service.script = cut(MESSAGE, 4)

    def talk() -> tuple[str, str]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
            with client.responses.stream(model=MODEL, input="hello", tools=[WEATHER]) as stream:
                text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                final = stream.get_final_response()
            return text, final.output_text

    text, whole = await asyncio.to_thread(talk)
    assert text == whole
    assert text.strip() == "I look."


# --- what becomes of a request


async def seen(expect: int = 200, options: dict[str, Any] | None = None, **fields: Any) -> tuple[FakeService, Any]:
    service = FakeService()
    async with app_client(service, **PARSERS, **(options or {})) as client:
        reply = await client.post("/v1/responses", json={"input": "hello", **fields})
    assert reply.status_code == expect, reply.text
    return service, reply.json()


async def test_what_reaches_the_template_and_the_sampler() -> None:
    service, reply = await seen(
        reasoning={"effort": "low", "summary": "auto"},
        tools=[{**WEATHER, "strict": None}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop="z",
        max_output_tokens=100_000,
        user="u",
        service_tier="auto",
    )
    (given,), (params,) = service.templated, service.requests[0].sampling_params
    assert (given["reasoning_effort"], given["tools"][0]["function"]["name"]) == ("low", "weather")
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 7, ["z"])
    assert "weather" in (params.structural_tag or "")
    assert (params.max_new_tokens, service.requests[0].cuts_new_tokens) == (100_000, True)
    assert (reply["tool_choice"], reply["parallel_tool_calls"], reply["reasoning"]["effort"]) == (
        {"type": "function", "name": "weather"},
        False,
        "low",
    )
    assert service.requests[0].rids == [reply["id"]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input must be"),
        ({"input": []}, "input must hold at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 'input[0] has the type "item_reference"'),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be one of"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood is not a field"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 'input[0].content[0] has the type "input_image"'),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}]}, "input[0].arguments must be"),
        ({"input": [{"type": "function_call_output", "output": "b"}]}, "input[0].call_id must be a string"),
        ({"tools": [{"type": "web_search"}]}, 'the type "web_search"'),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tools": [WEATHER, {"type": "namespace", "name": "n", "tools": [WEATHER]}]}, '"weather" comes twice'),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [1]}]}, "tools[0].tools must be a list of tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [WEATHER] * (CONTEXT_LEN + 1)}]}, "context length"),
        ({"include": ["file_search_call.results"]}, "include may hold"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0."),
        ({"truncation": "auto"}, "truncation must be disabled"),
        ({"text": {"verbosity": "low"}}, "text.verbosity must be medium"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type"),
        ({"reasoning": {"effort": "much"}}, "reasoning_effort must be one of"),
        ({"background": True, "stream": True}, "background together with stream"),
        ({"background": True, "store": False}, "background needs store"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"messages": []}, "messages is not a field"),
        ({"input": [{"role": "user", "content": "x"}] * (CONTEXT_LEN + 1)}, "context length"),
    ],
)
async def test_what_is_refused_is_named(fields: dict[str, Any], words: str) -> None:
    _, reply = await seen(400, **fields)
    assert words in reply["error"]["message"]


async def test_a_server_without_a_store() -> None:
    _, reply = await seen(options={"max_stored_responses": 0})
    assert reply["store"] is False
    _, reply = await seen(400, options={"max_stored_responses": 0}, background=True)
    assert "--max-stored-responses 0" in reply["message"]


def test_the_store_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.server.openai.responses.store.MOST_BYTES", 100)
    store = ResponseStore(50)
    for i in range(20):
        store.put(f"resp_{i}", Kept(b"x" * 20, b"y" * 10))
    assert (len(store), store.num_bytes) == (3, 90)
    store.get("resp_17")
    store.put("r20", Kept(b"x" * 40, None))
    assert store.num_bytes == 100
    assert store.get("resp_17").num_bytes == 30
    store.put("resp_large", Kept(b"x" * 101, None))
    with pytest.raises(RequestError):
        store.get("resp_large")
    store.put("resp_17", Kept(b"", None))
    assert store.num_bytes == 70


def test_shares_of_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("jaxserve.server.openai.responses.store.MOST_BYTES", 100)
    store = ResponseStore(5, Place(1, 3, tmp_path, 0))
    for name in ("resp_1_a", "resp_1_b", "resp_1_c"):
        store.put(name, Kept(b"x" * 10, None))
    assert (len(store), store.num_bytes) == (2, 20)
    store.put("resp_1_d", Kept(b"x" * 30, None))
    assert (len(store), store.num_bytes) == (1, 30)
    with pytest.raises(AnsweredElsewhere) as elsewhere:
        store.get("resp_2_a")
    assert elsewhere.value.front == 2
    with pytest.raises(RequestError):
        store.get("resp_3_a")
    assert not ResponseStore(0, Place(1, 3, tmp_path, 0)).is_open
