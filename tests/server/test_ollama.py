"""Ollama's API through the `ollama` package, on a model that says what a script has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest
from fake_service import CONTEXT_LEN, FakeService
from http_harness import MODEL, app_client, until
from scripted_server import MESSAGE, PARSERS, ScriptedServer, cut

from jaxserve.types import FinishReason

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Server(ScriptedServer):
    @property
    def client(self) -> ollama.AsyncClient:
        return ollama.AsyncClient(self.url, headers={"authorization": "Bearer k"})


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Server]:
    async with Server().running() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    return shared.reset()


async def both(server: Server, **fields: Any) -> ollama.ChatResponse:
    """What comes in one piece and what the lines of a stream add up to are one message."""
    fields = {"model": MODEL, "messages": HELLO, **fields}
    whole = await server.client.chat(**fields)
    *parts, last = [part async for part in await server.client.chat(**fields, stream=True)]
    assert not any(part.done for part in parts)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == (whole.message.thinking or "")
    assert [call for part in parts for call in part.message.tool_calls or []] == list(whole.message.tool_calls or [])
    assert (last.done, last.message.content) == (True, "")
    numbers = ("done_reason", "prompt_eval_count", "eval_count", "load_duration")
    assert [last[name] for name in numbers] == [whole[name] for name in numbers]
    return whole


async def test_a_text(server: Server) -> None:
    reply = await both(server, options={"num_predict": 3})
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "length")
    assert (reply.message.role, reply.message.content, reply.message.tool_calls) == ("assistant", "abc", None)
    assert (reply.prompt_eval_count, reply.eval_count) == (1 + len("user:hello"), 3)
    assert reply.total_duration == reply.prompt_eval_duration + reply.eval_duration == 250_000_000
    assert reply.created_at.endswith("Z")


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_thinking_text_and_calls(server: Server, size: int) -> None:
    server.service.script = cut(MESSAGE, size)
    reply = await both(server, tools=[WEATHER], think=True)
    assert (reply.message.thinking.strip(), reply.message.content.strip()) == ("Hm, Köln.", "I look.")
    assert [(call.function.name, call.function.arguments) for call in reply.message.tool_calls] == [
        ("weather", {"city": "Köln"}),
        ("weather", {"city": "Bonn"}),
    ]
    assert reply.done_reason == "stop"


async def test_each_call_has_an_id_and_its_place(server: Server) -> None:
    server.service.script = [MESSAGE]
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        reply = await client.post("/api/chat", json={"model": MODEL, "messages": HELLO, "tools": [WEATHER]})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


async def test_generate(server: Server) -> None:
    server.service.script = cut("<think>Hm.</think>Yes.", 4)
    whole = await server.client.generate(MODEL, "hello", system="Be brief.")
    assert (whole.response, whole.thinking, whole.done_reason) == ("Yes.", "Hm.", "stop")
    parts = [part async for part in await server.client.generate(MODEL, "hello", system="Be brief.", stream=True)]
    assert "".join(part.response for part in parts) == "Yes."
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert server.service.templated[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]


async def test_a_raw_prompt_has_no_template(server: Server) -> None:
    server.service.script = ["<think>a"]
    reply = await server.client.generate(MODEL, "hello", raw=True, options={"num_predict": 40, "seed": 5, "top_k": 0})
    assert (reply.response, reply.thinking) == ("<think>a", None)
    (request,) = server.service.requests
    (params,) = request.sampling_params
    assert request.prompts == ["hello"]
    assert (params.max_new_tokens, params.sampling_seed, params.top_k) == (40, 5, -1)
    assert request.cuts_new_tokens


async def test_logprobs(server: Server) -> None:
    reply = await server.client.chat(MODEL, HELLO, logprobs=True, top_logprobs=2, options={"num_predict": 2})
    assert [entry.token for entry in reply.logprobs] == ["a", "b"]
    assert [entry.token for entry in reply.logprobs[1].top_logprobs] == ["b", "z"]
    stream = await server.client.generate(MODEL, "x", logprobs=True, options={"num_predict": 2}, stream=True)
    assert [entry.token async for part in stream for entry in part.logprobs or []] == ["a", "b"]


async def test_without_anything_to_say_the_model_is_just_there(server: Server) -> None:
    loaded = await server.client.generate(MODEL)
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
    assert (await server.client.generate(MODEL, keep_alive=0)).done_reason == "unload"
    chat = await server.client.chat(MODEL, [])
    assert (chat.message.content, chat.done_reason) == ("", "load")
    with pytest.raises(ollama.ResponseError) as missing:
        await server.client.generate("other")
    assert missing.value.status_code == 404
    assert not server.service.requests


async def test_models(server: Server) -> None:
    (model,) = (await server.client.list()).models
    assert model.model == MODEL
    assert len(model.digest) == 64
    (running,) = (await server.client.ps()).models
    assert (running.name, running.context_length, running.expires_at.year) == (MODEL, CONTEXT_LEN, 9999)
    shown = await server.client.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == CONTEXT_LEN
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        assert (await client.get("/api/version")).json()["version"].count(".") == 2
        assert (await client.post("/api/show", json={"name": MODEL})).status_code == 200
        assert (await client.head("/")).status_code == 200


@pytest.mark.parametrize(("served", "asked"), [("m", "m:latest"), ("m:latest", "m"), ("m:7b", "m:7b"), ("m:7b", "m:7b:latest")])
async def test_names_with_and_without_a_tag(served: str, asked: str) -> None:
    async with app_client(FakeService(), served_model_name=served) as client:
        reply = await client.post("/api/chat", json={"model": asked, "messages": HELLO, "stream": False})
        assert reply.status_code == 200
        assert reply.json()["model"] == asked
        assert (await client.post("/api/chat", json={"model": "m:8b", "messages": HELLO})).status_code == 404


async def test_errors_in_the_client(server: Server) -> None:
    async def refused(**fields: Any) -> ollama.ResponseError:
        with pytest.raises(ollama.ResponseError) as error:
            await server.client.chat(**{"model": MODEL, "messages": HELLO, **fields})
        return error.value

    bad = await refused(options={"repeat_penalty": 5})
    assert (bad.status_code, bad.error) == (400, "repeat_penalty must be in (0, 2], got 5.0.")
    assert (await refused(model="other")).status_code == 404
    server.service.fail_after = (3, FinishReason.abort("Ran too long.", 503))
    assert (await refused()).status_code == 503
    with pytest.raises(ollama.ResponseError, match="Ran too long"):
        async for _ in await server.client.chat(MODEL, HELLO, stream=True):
            pass
    with pytest.raises(ollama.ResponseError) as denied:
        await ollama.AsyncClient(server.url, headers={"authorization": "Bearer wrong"}).list()
    assert denied.value.status_code == 401
    with pytest.raises(ollama.ResponseError) as absent:
        await server.client.pull("m")
    assert (absent.value.status_code, absent.value.error) == (404, "There is no endpoint POST /api/pull.")


async def test_the_synchronous_client(server: Server) -> None:
    server.service.script = cut(MESSAGE, 4)

    def talk() -> tuple[str, str]:
        client = ollama.Client(server.url, headers={"authorization": "Bearer k"})
        streamed = "".join(part.message.content for part in client.chat(MODEL, HELLO, stream=True))
        return streamed, client.chat(MODEL, HELLO).message.content

    streamed, whole = await asyncio.to_thread(talk)
    assert streamed == whole
    assert whole.strip().startswith("I look.")


async def test_a_client_that_leaves_aborts_its_request(server: Server) -> None:
    server.service.endless, server.service.step_s = True, 0.002
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        for path, body in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "x"})):
            server.service.aborted.clear()
            async with client.stream("POST", path, json={"model": MODEL, **body}) as reply:
                await anext(reply.aiter_lines())
            await until(lambda: len(server.service.aborted) == 1)
            waiting = asyncio.create_task(client.post(path, json={"model": MODEL, "stream": False, **body}))
            await until(lambda: server.service.num_live == 1)
            waiting.cancel()
            await until(lambda: len(server.service.aborted) == 2)
    assert server.service.num_live == 0


# --- what becomes of a request


async def seen(expect: int = 200, path: str = "/api/chat", **fields: Any) -> tuple[FakeService, Any]:
    service = FakeService()
    start = {"messages": HELLO} if path == "/api/chat" else {"prompt": "hello"}
    async with app_client(service, **PARSERS) as client:
        reply = await client.post(path, json={"model": MODEL, "stream": False, **start, **fields})
    assert reply.status_code == expect, reply.text
    return service, reply.json()


async def test_a_conversation_with_tools() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    service, _ = await seen(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi", "images": []},
            {
                "role": "assistant",
                "content": "",
                "thinking": "Hm.",
                "tool_calls": [call, {"id": "i", "type": "function", **call}],
            },
            {"role": "tool", "content": "sun", "tool_name": "weather", "tool_call_id": "i"},
        ],
        tools=[WEATHER],
    )
    (given,) = service.templated
    assert given["tools"] == [WEATHER]
    assert given["messages"][2:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", **call}, {"id": "i", "type": "function", **call}],
        },
        {"role": "tool", "content": "sun", "name": "weather", "tool_call_id": "i"},
    ]


async def test_what_reaches_the_template_and_the_sampler() -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": -1, "stop": ["z"],
        "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096, "num_gpu": 1, "mirostat": 0,
        "typical_p": 1.0, "repeat_last_n": 64, "numa": False,
    }  # fmt: skip
    service, _ = await seen(options=options, think="low", keep_alive="5m", truncate=True)
    (given,), (params,) = service.templated, service.requests[0].sampling_params
    assert (given["enable_thinking"], given["reasoning_effort"]) == (True, "low")
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.sampling_seed) == (0.5, 7, 0.9, 0.1, 3)
    assert (params.max_new_tokens, params.stop, params.repetition_penalty) == (None, ["z"], 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    service, _ = await seen(think=False, path="/api/generate", options={"num_predict": 100_000})
    assert service.templated[0]["enable_thinking"] is False
    assert service.requests[0].sampling_params[0].max_new_tokens == 100_000


@pytest.mark.parametrize("raw", [False, True])
async def test_formats_constrain_the_output(raw: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, wanted in ((schema, {**schema, "x-guidance": {"lenient": True}}), ("json", {"type": "object"})):
        service, _ = await seen(path="/api/generate", format=form, raw=raw)
        assert json.loads(service.requests[0].sampling_params[0].json_schema or "") == wanted
    service, _ = await seen(path="/api/generate", format="", raw=raw)
    assert service.requests[0].sampling_params[0].json_schema is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": None}, "model must be a string"),
        ({"messages": [{"role": "owner", "content": "a"}]}, "messages[0].role must be one of"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content must be a string"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images is not supported"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood is not a field"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "tool_calls[0].function.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]},
            "arguments must be",
        ),
        ({"options": {"mirostat": 1}}, "options.mirostat is not supported"),
        ({"options": {"draft": 1}}, "options.draft is not a field this server knows."),
        ({"options": {"temperature": "hot"}}, "options.temperature must be a number or null"),
        ({"format": "yaml"}, 'format must be "json" or a JSON schema, got "yaml".'),
        ({"think": "much"}, "think must be one of"),
        ({"path": "/api/generate", "suffix": "x"}, "suffix is not supported"),
        ({"path": "/api/generate", "template": "{{ .Prompt }}"}, "template is not supported"),
        ({"path": "/api/generate", "context": [1]}, "context is not supported"),
        ({"path": "/api/generate", "images": ["aGk="]}, "images is not supported"),
        ({"path": "/api/generate", "raw": True, "system": "s"}, "system needs a template"),
        ({"prompt": "a"}, "prompt is not a field"),
    ],
)
async def test_what_is_refused_is_named(fields: dict[str, Any], words: str) -> None:
    _, reply = await seen(400, **fields)
    assert words in reply["error"]
    assert reply["error"].endswith(".")


async def test_more_messages_than_the_context_has_tokens() -> None:
    calls = [{"function": {"name": "a", "arguments": {}}}] * (CONTEXT_LEN + 1)
    floods: list[dict[str, Any]] = [
        {"messages": HELLO * (CONTEXT_LEN + 1)},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]},
        {"messages": HELLO, "tools": [WEATHER] * (CONTEXT_LEN + 1)},
    ]
    for flood in floods:
        _, reply = await seen(400, **flood)
        assert "context length" in reply["error"]
