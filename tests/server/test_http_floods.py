"""Requests with more of something than could ever be served: refused by counting, before anything is done for each."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest import mock

import httpx
import pytest
from fake_service import CONTEXT_LEN, FakeService
from http_harness import app_client, live_server, until

from jaxserve.server.http import limits
from jaxserve.server.native import request as native_request
from jaxserve.server.openai import messages as openai_messages
from jaxserve.server.requests import RequestError

EMPTY: dict[str, Any] = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("messages", "num_pieces"),
    [
        ([EMPTY] * 50_000, 50_000),
        ([{"role": "user", "content": [PART] * 50_000}], 50_001),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL] * 50_000}], 50_001),
    ],
)
async def test_more_messages_than_the_context_has_tokens(path: str, messages: list[dict[str, Any]], num_pieces: int) -> None:
    with mock.patch.object(openai_messages, "_template_message", side_effect=AssertionError("work is done for a message")):
        async with app_client(FakeService()) as client:
            reply = await client.post(path, json={"messages": messages})
    assert reply.status_code == 400
    sentence = (
        f"messages holds at least {num_pieces} messages, content parts and tool calls: the input is longer than the model's "
    )
    assert f"{sentence}context length ({CONTEXT_LEN} tokens)." in reply.text


async def test_as_many_messages_as_the_context_has_tokens_are_rendered_off_the_loop() -> None:
    service = FakeService()
    async with app_client(service) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": [EMPTY] * CONTEXT_LEN, "max_tokens": 1})
    assert len(service.templated) == 1, reply.text


async def test_many_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    async with app_client(FakeService()) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": [EMPTY], "tools": [tool] * 1000})
    assert reply.status_code == 400 and "tools holds at least 1000 tools" in reply.text


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("stop", ["a"] * 5000, "32 entries"),
        ("stop_regex", ["a"] * 5000, "32 entries"),
        ("stop_token_ids", [1] * 5000, "64 entries"),
        ("logit_bias", {str(i): 1 for i in range(5000)}, "512"),
    ],
)
async def test_lists_are_counted_before_they_are_read(field: str, value: Any, most: str) -> None:
    async with app_client(FakeService()) as client:
        chat = await client.post("/v1/chat/completions", json={"messages": [EMPTY], field: value})
        with mock.patch.object(native_request, "convert", wraps=native_request.convert) as convert:
            native = await client.post("/generate", json={"text": "a", "sampling_params": {field: value}})
    for reply in (chat, native):
        assert reply.status_code == 400 and f"{field} may hold at most {most}" in reply.text, reply.text
    assert "sampling_params" not in [call.args[2] for call in convert.call_args_list], "not even its types were looked at"


async def test_the_number_of_prompts_is_checked_before_each_gets_its_parameters() -> None:
    service = FakeService()
    async with app_client(service) as client:
        await client.post("/generate", json={"text": ["a"] * 3, "sampling_params": [{}] * 3})
        await client.post("/v1/completions", json={"prompt": [[1], [2]], "n": 5, "max_tokens": 1})
        await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1})
    assert service.asked_for == [(3, 1), (2, 5), (1, 1)]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (
            "/tokenize",
            {"prompt": "a" * 2097153},
            "prompt may hold at most 2097152 characters in one request, got 2097153",
        ),
        ("/tokenize", {"prompt": [""] * 20_000}, "prompt may hold at most 16384 texts in one request, got 20000"),
        ("/detokenize", {"tokens": [1] * (1 << 21) + [1]}, "tokens may hold at most 2097152 tokens in one request"),
        ("/detokenize", {"tokens": [[]] * 20_000}, "tokens may hold at most 16384 lists of tokens in one request, got 20000"),
    ],
)
async def test_what_the_tokenizer_routes_take_is_bounded(path: str, body: dict[str, Any], sentence: str) -> None:
    async with app_client(FakeService()) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 400 and sentence in reply.text


async def test_bodies_that_are_being_read_have_a_sum() -> None:
    """Where there is room for one of the largest, a second is refused meanwhile; small ones are not, nor later ones."""
    mib = 1 << 20
    json_type = {"content-type": "application/json"}
    large = b'{"text": "x"}' + b" " * (4 * mib - 100)

    def slow(go_on: asyncio.Event, sent: list[int]) -> Any:
        async def chunks() -> Any:
            for start in range(0, len(large), mib // 4):
                if start >= 3.5 * mib:
                    await go_on.wait()
                yield large[start : start + mib // 4]
                sent.append(start)

        return chunks()

    with mock.patch.object(limits, "LARGE_BODIES_AT_ONCE", 1):
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(live_server(FakeService(), max_body_size_mb=4))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=json_type))
            go_on, sent = asyncio.Event(), [0]
            first = asyncio.create_task(client.post("/generate", content=slow(go_on, sent)))
            await until(lambda: sent[-1] >= 3.25 * mib)
            refused = await client.post("/generate", content=large)
            assert refused.status_code == 503, refused.text
            assert "being read hold 4 MiB" in refused.json()["error"]["message"]
            assert (await client.post("/generate", json={"text": "x"})).status_code == 200
            go_on.set()
            assert (await first).status_code == 200
            assert (await client.post("/generate", content=large)).status_code == 200
            go_on.clear()
            left = asyncio.create_task(client.post("/generate", content=slow(go_on, sent := [0])))
            await until(lambda: sent[-1] >= 3.25 * mib)
            left.cancel()
            await asyncio.sleep(0.1)
            assert (await client.post("/generate", content=large)).status_code == 200


@pytest.mark.parametrize(("at_once", "refused_mib", "status", "other_mib"), [(0, [2], 503, 1), (1, [3, 2], 413, 4)])
async def test_only_who_brings_much_is_refused_for_the_sum(
    at_once: int, refused_mib: list[int], status: int, other_mib: int
) -> None:
    """While a refusal cannot be sent, others of any size are served."""
    mib = 1 << 20
    served: list[bytes] = []
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            while (message := await receive())["more_body"]:
                pass
        except RequestError as error:
            statuses.append(error.status_code)
            await can_be_sent.wait()
        else:
            served.append(message["body"])

    async def request(*pieces: bytes) -> None:
        messages = iter([{"type": "http.request", "body": p, "more_body": i + 1 < len(pieces)} for i, p in enumerate(pieces)])

        async def receive() -> Any:
            return next(messages)

        await limited({"type": "http", "path": "/", "headers": []}, receive, mock.AsyncMock())

    can_be_sent = asyncio.Event()
    limited = limits.BodyLimitMiddleware(app, max_body_size_mb=4)
    with mock.patch.object(limits, "LARGE_BODIES_AT_ONCE", at_once):
        refused = asyncio.create_task(request(*(b"x" * n * mib for n in refused_mib), b""))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await request(b"small")
            await request(b"x" * (other_mib * mib - 3), b"end")
        assert (served, statuses) == ([b"small", b"end"], [status])
        assert not refused.done()
        can_be_sent.set()
        await refused
