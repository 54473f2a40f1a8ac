"""What an error looks like on the wire: envelopes, statuses, bodies nobody can parse, bodies that are too large."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from fake_service import FakeService
from http_harness import app_client, error_message

from jaxserve.server.http.envelopes import envelope_of
from jaxserve.server.requests import RequestError

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", CHAT, "/tokenize", "/abort_request", "/v1/messages", "/v1/responses", "/api/chat"]
)
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"model": 5, "rid": [], "prompt": NaN}', "not valid JSON"),
        (b'{"unknown": 5, "prompt": NaN}', "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b'{"text": ' + b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "must be"),
        (b'"text"', "must be"),
    ],
)
async def test_unreadable_bodies_are_400(path: str, raw: bytes, words: str) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post(path, content=raw, headers=JSON)
    assert reply.status_code == 400
    assert words in error_message(reply)


@pytest.mark.parametrize("depth", [100, 500, 900, 970, 990])
async def test_what_is_nested_deeply_is_no_server_error(depth: int) -> None:
    nested = "[" * depth + "1" + "]" * depth
    call = '{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": %s}}]}'
    messages = ('{"role": %s}', '{"role": "user", "content": %s}', '{"role": "assistant", "tool_calls": {"a": %s}}', call)
    bodies = [f'{{"messages": [{message % nested}]}}' for message in messages]
    bodies.append(f'{{"messages": [{call % json.dumps("[" * 100_000)}]}}')
    bodies.append(f'{{"messages": [{{"role": "user", "content": "a"}}], "tool_choice": {{"a": {nested}}}}}')
    async with app_client(FakeService()) as client:
        for body in bodies:
            reply = await client.post(CHAT, content=body, headers=JSON)
            assert reply.status_code in (200, 400), reply.text


async def test_names_of_unknown_fields_are_cut() -> None:
    async with app_client(FakeService()) as client:
        for name in ("x" * 100_000, "", "a`b", "prompt[0]"):
            reply = await client.post("/v1/completions", json={"prompt": "a", name: 1})
            assert reply.status_code == 400
            assert "is not a field this server knows." in reply.json()["message"] and len(reply.text) < 1000


async def test_an_empty_body_is_400_where_something_must_be_in_it() -> None:
    async with app_client(FakeService()) as client:
        for path in ("/generate", "/v1/completions", CHAT, "/tokenize"):
            reply = await client.post(path, content=b"", headers=JSON)
            assert reply.status_code == 400
            assert "is empty" in reply.json()["error"]["message"]
        reply = await client.post("/set_internal_state", content=b"", headers=JSON)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "server_args is required.")


async def test_broken_text_is_400() -> None:
    async with app_client(FakeService()) as client:
        for path, raw in (("/generate", b'{"text": "\xff"}'), ("/v1/completions", b'{"prompt": "\xff"}')):
            reply = await client.post(path, content=raw, headers=JSON)
            assert reply.status_code == 400
            assert "not valid JSON" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"]
)
async def test_bodies_say_that_they_are_json(kind: str | None) -> None:
    """A browser sends other kinds to any address without asking."""
    service = FakeService()
    headers = {} if kind is None else {"content-type": kind}

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    async with app_client(service) as client:
        for path in (CHAT, "/v1/messages", "/api/chat", "/generate", "/tokenize", "/abort_request", "/pause_generation"):
            for content in (b"{}", chunks()):
                reply = await client.post(path, content=content, headers=headers)
                assert reply.status_code == 400
                assert "With curl, add -H 'Content-Type: application/json'." in error_message(reply)
        assert (await client.put("/generate", content=b"{}", headers=headers)).status_code == 400
        assert (await client.post("/pause_generation", headers=headers)).status_code == 200  # no body
    assert service.requests == []


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_spellings_of_json(kind: str) -> None:
    async with app_client(FakeService()) as client:
        for path in ("/v1/completions", "/generate"):
            content = b'{"prompt": "x"}' if path.startswith("/v1") else b'{"text": "x"}'
            assert (await client.post(path, content=content, headers={"content-type": kind})).status_code == 200


async def test_unknown_paths_and_methods() -> None:
    async with app_client(FakeService()) as client:
        missing = await client.get("/v1/nothing")
        native = await client.get("/nothing")
        method = await client.get("/generate")
    assert (missing.status_code, native.status_code, method.status_code) == (404, 404, 405)
    assert missing.json()["message"] == "There is no endpoint GET /v1/nothing."
    assert native.json()["error"]["message"] == "There is no endpoint GET /nothing."
    assert "GET" in method.json()["error"]["message"]
    assert method.headers["allow"]


async def test_both_envelopes() -> None:
    async with app_client(FakeService()) as client:
        openai = (await client.post("/v1/completions", json={"prompt": "x", "n": 0})).json()
        native = (await client.post("/generate", json={"text": "x", "sampling_params": {"n": "two"}})).json()
    flat = {key: openai[key] for key in ("message", "type", "param", "code")}
    assert (openai["object"], flat["type"], flat["param"], flat["code"]) == ("error", "BadRequestError", "n", 400)
    assert openai["error"] == flat
    assert (native["object"], native["type"], native["code"]) == ("error", "BadRequestError", 400)
    assert native["error"] == {key: native[key] for key in ("message", "type", "code")}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (405, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropics_and_ollamas_envelopes(status: int, kind: str) -> None:
    error = RequestError("max_new_tokens is 7.", status, param="max_new_tokens")
    anthropic, ollama = (envelope_of(path).body(error) for path in ("/v1/messages/count_tokens", "/api/chat"))
    assert anthropic == {"type": "error", "error": {"type": kind, "message": "max_tokens is 7."}}
    assert ollama == {"error": "num_predict is 7."}


async def test_a_wrong_path_or_method_in_each_envelope() -> None:
    async with app_client(FakeService()) as client:
        anthropic = await client.get("/v1/messages")
        ollama = await client.post("/api/embed", json={})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (405, "invalid_request_error")
    assert (ollama.status_code, ollama.json()) == (404, {"error": "There is no endpoint POST /api/embed."})


async def test_names_from_behind_the_routes_become_openais() -> None:
    service = FakeService()
    service.crash = RequestError("max_new_tokens is 7; the context length is 5.", param="max_new_tokens")
    async with app_client(service) as client:
        error = (await client.post("/v1/completions", json={"prompt": "x"})).json()
    assert (error["param"], error["message"]) == ("max_tokens", "max_tokens is 7; the context length is 5.")


@pytest.mark.parametrize("path", ["/generate", CHAT])
async def test_bodies_beyond_the_limit_are_413(path: str) -> None:
    body = b'{"text": "' + b"x" * (1 << 20) + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    async with app_client(FakeService(), max_body_size_mb=1) as client:
        declared = await client.post(path, content=body, headers=JSON)
        chunked = await client.post(path, content=chunks(), headers=JSON)
        fits = await client.post("/tokenize", content=b'{"prompt": "' + b"x" * ((1 << 20) - 14) + b'"}', headers=JSON)
    for reply in (declared, chunked):
        assert reply.status_code == 413
        assert "at most 1 MiB" in reply.json()["error"]["message"]
    assert fits.status_code == 200
