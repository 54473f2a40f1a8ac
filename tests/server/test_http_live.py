"""Through a real uvicorn and real sockets: clients that leave, the openai client, bodies too large, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_service import FakeService
from http_harness import MODEL, events_of, live_server, self_signed, until

from jaxserve.types import FinishReason

MESSAGES = [{"role": "user", "content": "hello"}]
EIGHT = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 8}}
BODIES = [
    ("/generate", {"text": "x", "rid": "r"}),
    ("/v1/completions", {"prompt": "x", "rid": "r"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "rid": "r"}),
]


def endless() -> FakeService:
    service = FakeService()
    service.endless, service.step_s = True, 0.002
    return service


async def raw_post(url: str, path: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    writer.write(raw_request(path, body))
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_client_that_leaves_aborts_its_request(path: str, body: dict[str, object], stream: bool) -> None:
    service = endless()
    async with live_server(service) as url:
        reader, writer = await raw_post(url, path, {**body, "stream": stream})
        await until(lambda: service.steps >= 3)
        if stream:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await until(lambda: service.aborted == ["r"])
        steps = service.steps
        await asyncio.sleep(0.05)
        assert service.steps == steps, "it went on generating for nobody"
        assert service.num_live == 0


async def test_a_client_that_leaves_before_the_first_token() -> None:
    service = endless()
    service.step_s = 60
    async with live_server(service) as url:
        _, writer = await raw_post(url, "/generate", {"text": "x", "rid": "r", "stream": True})
        await until(lambda: service.requests)
        writer.close()
        await until(lambda: service.aborted == ["r"])


async def test_others_do_not_notice() -> None:
    service = FakeService()
    service.step_s = 0.002
    async with live_server(service) as url, httpx.AsyncClient(base_url=url) as client:
        _, writer = await raw_post(url, "/generate", {"text": "x", "rid": "gone", "sampling_params": {"max_new_tokens": 50}})
        await until(lambda: service.steps >= 2)
        other = asyncio.create_task(client.post("/generate", json={"text": "y", "sampling_params": {"max_new_tokens": 20}}))
        await until(lambda: len(service.requests) == 2)
        writer.close()
        assert len((await other).json()["output_ids"]) == 20
        assert service.aborted == ["gone"]


async def test_connections_are_reused() -> None:
    async with live_server(FakeService()) as url:
        reader, writer = await raw_post(url, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
        for _ in range(3):
            headers = await reader.readuntil(b"\r\n\r\n")
            length = int(headers.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(raw_request("/generate", {"text": "y"}))
        await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_a_slow_reader_holds_back_only_itself() -> None:
    """What it has not taken is merged: it finds the newest state, and others notice nothing."""
    service = FakeService()
    service.endless = True
    async with live_server(service) as url:
        with slow_socket(url) as client:
            client.sendall(raw_request("/generate", {"text": "x", "rid": "slow", "stream": True}))
            # Cumulative events grow, so the buffers are full long before.
            await until(lambda: service.steps > 3000, 20)
            async with httpx.AsyncClient(base_url=url) as other:
                assert (await other.get("/health")).status_code == 200
            service.endless = False
            events = events_of(await asyncio.to_thread(read_chunked_body, client))
    assert len(events) < service.steps / 2, "its events were merged"
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(events[-1]["output_ids"]) == len(events[-1]["text"]) == service.steps
    assert service.aborted == []


async def test_merged_events_of_a_slow_reader_lose_nothing() -> None:
    service = FakeService()
    service.endless = True
    async with live_server(service) as url:
        with slow_socket(url) as client:
            client.sendall(raw_request("/v1/completions", {"prompt": "x", "stream": True, "n": 2}))
            await until(lambda: service.steps > 12_000, 30)
            service.endless = False
            events = events_of(await asyncio.to_thread(read_chunked_body, client))
    expected = "".join(string.ascii_lowercase[i % 26] for i in range(service.steps))
    for index in range(2):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == expected
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


async def test_a_reader_that_takes_nothing_loses_its_connection() -> None:
    service = FakeService()
    service.endless = True
    async with live_server(service, stream_stall_timeout_s=0.3) as url:
        with slow_socket(url) as client:
            client.sendall(raw_request("/generate", {"text": "x", "rid": "stalled", "stream": True}))
            await until(lambda: service.aborted == ["stalled"], 20)
        assert service.num_live == 0
        async with httpx.AsyncClient(base_url=url) as other:
            assert (await other.get("/health")).status_code == 200


async def test_a_reader_that_takes_a_little_now_and_then_stays() -> None:
    service = FakeService()
    service.endless = True
    async with live_server(service, stream_stall_timeout_s=0.5) as url:
        with slow_socket(url) as client:
            client.sendall(raw_request("/generate", {"text": "x", "rid": "slow", "stream": True}))
            await until(lambda: service.steps > 1500, 20)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            for _ in range(10):
                for _ in range(20):
                    await loop.sock_recv(client, 4096)
                await asyncio.sleep(0.1)
            assert service.aborted == []
        await until(lambda: service.aborted == ["slow"])


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
async def test_ordinary_replies_must_be_taken_too(header: bytes) -> None:
    """A reply of some 8 MB, more than the buffers of the system hold."""
    request = raw_request("/tokenize", {"prompt": "x" * 2_000_000}).replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n")
    async with live_server(FakeService(), stream_stall_timeout_s=0.5) as url:
        with slow_socket(url) as client:
            await asyncio.to_thread(client.sendall, request)
            await asyncio.sleep(2)
            client.settimeout(20)
            head, _, body = (await asyncio.to_thread(read_to_the_end, client)).partition(b"\r\n\r\n")
        assert 0 < len(body) < int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        async with httpx.AsyncClient(base_url=url) as other:
            assert (await other.get("/health")).status_code == 200


def read_to_the_end(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while received := client.recv(1 << 20):
            data += received
    return data


async def test_http_1_0_gets_no_chunks() -> None:
    async with live_server(FakeService()) as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(raw_request("/generate", EIGHT).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert events_of(body.decode())[-1]["text"] == "abcdefgh"


async def test_http_1_0_gets_a_refusal_whole() -> None:
    async with live_server(FakeService()) as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(raw_request("/generate", {**EIGHT, "text": "x" * 200}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b" 400 " in head.splitlines()[0]
    assert "limit 100" in json.loads(body)["message"]


async def test_pipelined_streams_answer_in_turn() -> None:
    service = FakeService()
    service.step_s = 0.001
    async with live_server(service) as url:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        for rid in ("one", "two", "three"):
            writer.write(raw_request("/generate", {**EIGHT, "rid": rid}))
        for rid in ("one", "two", "three"):
            await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"0\r\n\r\n")
            assert body.count(b'"id":"%b"' % rid.encode()) == 8
            assert body.count(b"data: ") == 9
        writer.close()


async def test_streams_over_tls(tmp_path: Path) -> None:
    service = FakeService()
    service.step_s = 0.001
    certificate, key = self_signed(tmp_path)
    async with live_server(service, ssl_certfile=certificate, ssl_keyfile=key) as url:
        trusted = ssl.create_default_context(cafile=certificate)
        async with httpx.AsyncClient(base_url=url, verify=trusted) as client:
            reply = await client.post("/generate", json=EIGHT)
            assert [event["text"] for event in events_of(reply.text)] == ["abcdefgh"[: i + 1] for i in range(8)]
        service.endless = True
        async with (
            httpx.AsyncClient(base_url=url, verify=trusted) as client,
            client.stream("POST", "/generate", json={**EIGHT, "rid": "left"}) as left,
        ):
            await anext(left.aiter_lines())
        await until(lambda: service.aborted == ["left"])


def raw_request(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_chunked_body(client: socket.socket) -> str:
    """All that is left of one reply."""
    client.settimeout(20)
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        received = client.recv(1 << 16)
        assert received, "the connection ended before the reply"
        data += received
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body.decode()


@contextlib.contextmanager
def slow_socket(url: str) -> Iterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((urlsplit(url).hostname, urlsplit(url).port))
        yield client


async def test_large_bodies_over_the_wire() -> None:
    body = b'{"text": "' + b"x" * (3 << 20) + b'"}'

    async def chunks():
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    async with live_server(FakeService(), max_body_size_mb=1) as url, httpx.AsyncClient(base_url=url) as client:
        for content in (body, chunks()):
            reply = await client.post("/generate", content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 413
        assert (await client.post("/generate", json={"text": "x"})).status_code == 200


def client_of(url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key=api_key, max_retries=0)


async def test_the_async_openai_client() -> None:
    async with live_server(FakeService(), api_key="k") as url, client_of(url, "k") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        chat = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2, n=2
        )
        assert [choice.message.content for choice in chat.choices] == ["abc", "abc"]
        assert chat.choices[0].logprobs.content[2].top_logprobs[1].token == "z"
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + 6
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abc"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 3
        text = await client.completions.create(model=MODEL, prompt=["x", "y"], max_tokens=2, logprobs=1, echo=False)
        assert [choice.text for choice in text.choices] == ["ab", "ab"]
        assert text.choices[0].logprobs.tokens == ["a", "b"]


async def test_errors_in_the_openai_client() -> None:
    service = FakeService()
    async with live_server(service, api_key="k") as url:
        async with client_of(url, "k") as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
            assert (bad.value.param, bad.value.type, bad.value.code) == ("temperature", "BadRequestError", "400")
            assert "temperature must be" in bad.value.message
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="nope", prompt="x")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            service.fail_after = (3, FinishReason.abort("Ran too long.", 503))
            with pytest.raises(openai.APIError, match="Ran too long"):
                async for _ in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                    pass
        async with client_of(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError) as denied:
                await client.models.list()
            assert denied.value.code == "invalid_api_key"


async def test_the_synchronous_openai_client() -> None:
    def talk(url: str) -> str:
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async with live_server(FakeService()) as url:
        assert await asyncio.to_thread(talk, url) == "abcd"


async def test_closing_an_openai_stream_aborts() -> None:
    service = endless()
    async with live_server(service) as url, client_of(url, "none") as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: len(service.aborted) == 1)


async def test_events_that_are_ready_together_arrive_whole() -> None:
    async with live_server(FakeService()) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"text": ["x"] * 20, "sampling_params": {"max_new_tokens": 5}, "stream": True}
        async with client.stream("POST", "/generate", json=body) as reply:
            assert reply.headers["transfer-encoding"] == "chunked"
            lines = [line async for line in reply.aiter_lines() if line]
    assert len(lines) == 101
    assert lines[-1] == "data: [DONE]"
