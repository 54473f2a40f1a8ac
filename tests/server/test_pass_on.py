"""Requests that another process answers: a main process and two fronts, real servers on real sockets, in one test process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import uvloop
from fake_service import FakeService
from http_harness import MODEL, error_message, events_of, live_server, self_signed, until

from jaxserve.scheduler.control.registry import controls
from jaxserve.server.elsewhere import AnsweredElsewhere, Place, http_socket
from jaxserve.server.requests import GenerateReqInput
from jaxserve.server.sinks import ChunkSink
from jaxserve.types import FinishReason

KEYS = {"api_key": "k", "admin_api_key": "a"}
SAYS_MAIN = {"x": "y"}
LONG = {"text": "x", "rid": "r", "stream": True}


class Service(FakeService):
    """Says of requests that another process has what they need: `elsewhere` holds whom to name."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[int | None] = []

    @contextlib.asynccontextmanager
    async def stream(self, req: GenerateReqInput, sink: ChunkSink) -> AsyncIterator[None]:
        if self.elsewhere:
            await asyncio.sleep(0)
            raise AnsweredElsewhere(self.elsewhere[0])
        async with super().stream(req, sink):
            yield


@dataclasses.dataclass
class Server:
    folder: Path
    main: Service
    fronts: list[Service]
    urls: list[str]  # of the fronts
    ends: list[contextlib.AsyncExitStack]  # of main and the fronts

    def http(self, front: int, key: str = "k") -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.urls[front], headers={"authorization": f"Bearer {key}"}, timeout=20)

    def openai(self, front: int) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.urls[front] + "/v1", api_key="k", max_retries=0)

    async def end(self, front: int | None) -> None:
        await self.ends[0 if front is None else front + 1].aclose()


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Server]:
    options = {**KEYS, "tokenizer_worker_num": 2, "max_stored_responses": 8, **options}
    server = Server(folder, Service(), [Service(), Service()], [], [])
    server.main.model_info = {"model_path": "main's"}
    async with contextlib.AsyncExitStack() as everything:
        for front, service in ((None, server.main), *enumerate(server.fronts)):
            place = None if front is None else Place(front, 2, folder, 123)
            stack = await everything.enter_async_context(contextlib.AsyncExitStack())
            inside = http_socket(folder, front)
            url = await stack.enter_async_context(live_server(service, place=place, inside=inside, **options))
            server.ends.append(stack)
            if front is not None:
                server.urls.append(url)
        yield server


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Server]:
    async with running(folder) as one:
        yield one


MAIN_PATHS = [
    *((method, c.route.path, c.name) for c in controls().values() if c.route is not None for method in c.route.methods),
    *(("GET", path, None) for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info")),
    *(("GET", path, None) for path in ("/v1/loads", "/recent_requests?limit=3", "/metrics")),
]


async def test_what_concerns_the_whole_server(server: Server) -> None:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(http_socket(server.folder, None)))) as direct:
        for method, path, name in MAIN_PATHS:
            key = "a" if name is not None and controls()[name].route.needs_admin_key else "k"
            async with server.http(0, key) as client:
                reply = await client.request(method, path, headers={"accept": "text/plain"})
            headers = {"authorization": f"Bearer {key}", "host": "127.0.0.1"}
            own = await direct.request(method, f"http://127.0.0.1{path}", headers=headers)
            assert (reply.status_code, reply.headers["content-type"]) == (own.status_code, own.headers["content-type"]), path
            if path not in ("/server_info", "/get_server_info", "/v1/loads", "/recent_requests?limit=3", "/metrics"):
                assert reply.text == own.text, path
            assert (len(server.main.controls), server.fronts[0].controls) == (len(server.main.controls), []), path
    assert len(server.main.controls) >= len(MAIN_PATHS)


async def test_a_control_with_a_body_and_its_errors(server: Server) -> None:
    async with server.http(1, "a") as client:
        reply = await client.post("/abort_request", json={"rid": "x"})
        assert (reply.status_code, server.main.controls[-1].rid) == (200, "x")
        refused = await client.post("/abort_request", json={"rid": 5})
        assert (refused.status_code, "rid must be" in error_message(refused)) == (400, True)
        assert (await client.put("/abort_request")).status_code == 405
        assert (await client.head("/abort_request")).status_code == 405
        query = await client.get("/flush_cache", params={"timeout": "2.5"})
        assert query.status_code in (200, 400)
        assert (await client.get("/health")).text == "ready\n"
    async with server.http(1) as client:
        server.main.status = "failed"
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/server_info")).json()["status"] == "failed"


async def test_keys_are_checked_where_the_client_is(server: Server) -> None:
    async with server.http(0, "wrong") as client:
        for path in ("/flush_cache", "/server_info", "/abort_request"):
            assert (await client.post(path)).status_code == 401
    async with server.http(0) as client:
        assert (await client.post("/flush_cache")).status_code == 401
        page = {"origin": "http://evil.example"}
        assert (await client.get("/server_info", headers=page)).status_code == 403
    assert server.main.controls == []


async def test_headers_come_once(server: Server) -> None:
    async with server.http(0) as client:
        page = {"origin": "http://127.0.0.1:1", "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        for path in ("/server_info", "/health"):
            reply = await client.get(path, headers=page)
            assert reply.status_code == 200
            names = [name for name, _ in reply.headers.multi_items()]
            assert len(names) == len(set(names)), names
            assert reply.headers["access-control-allow-origin"] == "*"
            assert "date" in reply.headers
            assert "connection" not in reply.headers
        # The connection stays open.
        assert (await client.get("/server_info", headers={"connection": "close"})).headers["connection"] == "close"


async def test_requests_are_counted_once(server: Server) -> None:
    async with server.http(0) as client:
        await client.get("/server_info")
        server.fronts[0].elsewhere = [1]
        assert (await client.post("/generate", json={"text": "x"})).status_code == 200
    for service, count in ((server.main, 0), (server.fronts[1], 0), (server.fronts[0], 2)):
        text, _ = await service.scrape("text/plain")
        lines = [line for line in text.decode().splitlines() if line.startswith("jaxserve:http_responses_total{")]
        assert sum(float(line.split()[-1]) for line in lines) == count, lines


@pytest.mark.parametrize("owner", [1, None])
async def test_what_another_process_has(server: Server, owner: int | None) -> None:
    """Raised in a route, before and in a stream; the body goes along."""
    service = server.main if owner is None else server.fronts[owner]
    server.fronts[0].elsewhere = [owner]
    text = "é" * (5 << 19)
    async with server.http(0) as client:
        reply = await client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 3}})
        assert reply.json()["text"] == "abc"
        reply = await client.post("/generate", json={**LONG, "sampling_params": {"max_new_tokens": 3}})
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert [event["text"] for event in events_of(reply.text)] == ["a", "ab", "abc"]
        long = await client.post("/generate", json={"text": text})
        assert (long.status_code, service.requests[-1].prompts) == (400, [text])
        assert error_message(long) == f"The prompt has {len(text) + 1} tokens; limit 100."

        async def chunks() -> AsyncIterator[bytes]:
            for part in (b'{"text":', b' "x"', b"}"):
                yield part
                await asyncio.sleep(0.01)

        headers = {"content-type": "application/json", "expect": "100-continue"}
        reply = await client.post("/generate?a=b%20c", content=chunks(), headers=headers)
        assert (reply.status_code, reply.json()["text"][:3]) == (200, "abc")
        assert (await client.post("/generate", json={"text": "x", "rid": 5})).status_code == 400
    assert server.fronts[0].requests == []


async def test_a_large_reply_and_a_slow_reader(server: Server) -> None:
    """What the client does not take stays with the owner, which merges it."""
    server.fronts[0].elsewhere, server.fronts[1].endless = [1], True
    async with server.http(0) as client, client.stream("POST", "/generate", json=LONG) as reply:
        lines = reply.aiter_lines()
        await anext(lines)
        await until(lambda: server.fronts[1].steps > 5000, 30)
        server.fronts[1].endless = False
        events = events_of("".join([f"{line}\n" async for line in lines if line != ""]).replace("\n", "\n\n"))
    assert events[-1]["meta_info"]["completion_tokens"] == server.fronts[1].steps
    assert len(events) < server.fronts[1].steps


async def test_chunks_come_as_they_are_made(server: Server) -> None:
    owner = server.fronts[1]
    server.fronts[0].elsewhere, owner.step_s, owner.endless = [1], 0.002, True
    async with server.http(0) as client, client.stream("POST", "/generate", json=LONG) as reply:
        lines = reply.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["text"] == "a"
        steps = owner.steps
        assert owner.num_live == 1
        await until(lambda: owner.steps > steps + 3)
        owner.endless = False
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(server: Server, stream: bool) -> None:
    owner = server.fronts[1]
    server.fronts[0].elsewhere, owner.step_s, owner.endless = [1], 0.002, True
    async with server.http(0) as client:
        request = asyncio.create_task(client.post("/generate", json={**LONG, "stream": stream}))
        await until(lambda: owner.steps > 3)
        request.cancel()
        await until(lambda: owner.aborted == ["r"])
    assert owner.num_live == 0


ENVELOPES = [
    ("/generate", {"text": "x"}, lambda body: (body["object"], body["error"]["code"]) == ("error", 503)),
    ("/v1/completions", {"prompt": "x"}, lambda body: body["error"]["type"] == "ServiceUnavailableError"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "model": MODEL},
     lambda body: body["error"]["type"] == "overloaded_error"),
    ("/api/generate", {"model": MODEL, "prompt": "x"}, lambda body: isinstance(body["error"], str)),
]  # fmt: skip


async def test_an_owner_that_is_gone(server: Server) -> None:
    server.fronts[0].elsewhere = [1]
    await server.end(1)
    await server.end(None)
    async with server.http(0) as client:
        for path, body, fits in ENVELOPES:
            for stream in (False, True):
                reply = await client.post(path, json={**body, "stream": stream})
                assert (reply.status_code, fits(reply.json())) == (503, True), (path, reply.text)
                assert "Front process 1, which has what this request needs" in error_message(reply)
        reply = await client.get("/server_info")
        assert (reply.status_code, "The main process" in error_message(reply)) == (503, True)
        assert (await client.get("/health")).status_code == 200


@contextlib.asynccontextmanager
async def says(path: Path, *parts: bytes) -> AsyncIterator[list[bytes]]:
    """An owner that reads a head and says just this, then closes the connection; what it read."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        yield heads


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nX-Own: 1\r\nConnection: close\r\nKeep-Alive: 5\r\nDate: never\r\nServer: s\r\n"
)


async def _read(reply: httpx.Response, seen: list[bytes]) -> None:
    async for chunk in reply.aiter_raw():
        seen.append(chunk)


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD + b"content-length: 10\r\n\r\n", b"12345"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"5\r\n12345\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"5\r\n12345\r\n", b"nonsense\r\n"),
    ],
)
async def test_an_owner_that_ends_in_the_middle(server: Server, parts: tuple[bytes, ...]) -> None:
    await server.end(None)
    async with says(http_socket(server.folder, None), *parts):
        async with server.http(0) as client, client.stream("GET", "/server_info") as reply:
            assert reply.status_code == 200
            seen: list[bytes] = []
            with pytest.raises(httpx.RemoteProtocolError):
                await _read(reply, seen)
            assert b"".join(seen) == b"12345"
        async with server.http(0) as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("parts", [(), (b"HTTP/1.1 200 OK\r\nX-",), (b"nonsense",)])
async def test_an_owner_that_ends_before_its_reply(server: Server, parts: tuple[bytes, ...]) -> None:
    await server.end(None)
    async with says(http_socket(server.folder, None), *parts), server.http(0) as client:
        reply = await client.get("/server_info")
        assert (reply.status_code, error_message(reply).endswith("try again later.")) == (503, True)


async def test_any_reply_and_any_head(server: Server) -> None:
    await server.end(None)
    path = http_socket(server.folder, None)
    async with server.http(0) as client:
        trace = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "te": "trailers", "x-odd": "é".encode()}
        async with says(path, b"HTTP/1.1 204 No Content\r\nx-a: 1\r\nx-a: 2\r\n\r\n") as heads:
            reply = await client.get("/server_info?a=b%2Fc", headers=trace)
            assert (reply.status_code, reply.headers.get_list("x-a"), reply.content) == (204, ["1", "2"], b"")
        first, *lines = heads[0].decode().split("\r\n")
        assert first == "GET /server_info?a=b%2Fc HTTP/1.1"
        assert "x-odd: é" in lines
        assert f"traceparent: {trace['traceparent']}" in lines
        assert lines[-4:] == ["connection: close", "content-length: 0", "", ""]
        assert not [line for line in lines if line.startswith("te:")]
        async with says(path, HEAD + b"content-length: 10\r\n\r\n"):
            reply = await client.head("/server_info")
            assert (reply.status_code, reply.headers["content-length"], reply.content) == (200, "10", b"")
            assert "s" not in (reply.headers.get("server"), reply.headers["date"])
        async with says(path, HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"0\r\ntrailer: x\r\n\r\n"):
            reply = await client.get("/server_info")
            assert (reply.content, "trailer" in reply.headers) == (b"abc", False)
        large = b"x" * (5 << 20)
        for framing in (b"content-length: %d\r\n\r\n" % len(large), b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(large)):
            async with says(path, HEAD + framing, large, b"\r\n0\r\n\r\n" if b"chunked" in framing else b""):
                assert (await client.get("/server_info")).content == large


async def test_http_1_0(server: Server) -> None:
    """As some proxies speak it: no chunks, the end of the connection is the end; also where the request is refused."""
    server.fronts[0].elsewhere = [1]
    address = urlsplit(server.urls[0])
    for fields, status, end in (({}, b" 200 ", b"data: [DONE]\n\n"), ({"text": "x" * 200}, b" 400 ", b"}")):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        data = json.dumps({**LONG, **fields}).encode()
        head = "POST /generate HTTP/1.0\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert status in head.splitlines()[0]
        assert b"chunked" not in head
        assert body.endswith(end)


async def test_no_loops(server: Server) -> None:
    server.fronts[0].elsewhere, server.fronts[1].elsewhere = [1], [0]
    async with server.http(0) as client:
        reply = await client.post("/v1/completions", json={"prompt": "x"})
        assert (reply.status_code, "disagree" in error_message(reply)) == (500, True)
        server.fronts[1].elsewhere = [None]
        assert (await client.post("/generate", json=LONG)).status_code == 500
        server.fronts[0].elsewhere = [0]  # a bug, of which uvicorn's log tells
        assert (await client.post("/generate", json={"text": "x"})).status_code == 500


async def test_a_proxy_that_is_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its headers name a client; a request that was passed on is one all the same."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with running(folder) as server, server.http(0) as client:
        server.fronts[0].elsewhere, server.fronts[1].elsewhere = [1], [0]
        forwarded = {"x-forwarded-for": "9.9.9.9", "x-forwarded-proto": "https"}
        assert (await client.post("/generate", json={"text": "x"}, headers=forwarded)).status_code == 500
        assert (await client.get("/server_info", headers=forwarded)).status_code == 200


async def test_a_body_at_its_limit(folder: Path) -> None:
    async with running(folder, max_body_size_mb=1) as server, server.http(0, "a") as client:

        async def chunks(num_bytes: int) -> AsyncIterator[bytes]:
            yield b'{"rid": "'
            for _ in range(num_bytes >> 16):
                yield b"x" * (1 << 16)
            yield b'"}'

        headers = {"content-type": "application/json"}
        assert (await client.post("/abort_request", content=chunks(2 << 20), headers=headers)).status_code == 413
        assert server.main.controls == []
        reply = await client.post("/abort_request", content=chunks(15 << 16), headers=headers)
        assert (reply.status_code, len(server.main.controls)) == (200, 1)


async def test_a_head_at_its_limits(server: Server) -> None:
    """What was added on the way counts for nobody."""
    async with server.http(0) as client:
        many = [(f"x-{i}", "v") for i in range(250)]
        assert (await client.get("/server_info", headers=many)).status_code == 200
        assert (await client.get("/server_info", headers={"x": "y" * (65_100)})).status_code == 200


async def test_under_the_path_of_a_proxy(folder: Path) -> None:
    async with running(folder, fastapi_root_path="/v1") as server, server.http(0) as client:
        for path in ("/v1/server_info", "/server_info", "/v1/v1/loads"):
            assert (await client.get(path)).status_code == 200, path


async def test_with_tls(folder: Path, tmp_path: Path) -> None:
    """Inside there is none."""
    certificate, key = self_signed(tmp_path)
    async with running(folder, ssl_certfile=certificate, ssl_keyfile=key) as server:
        headers = {"authorization": "Bearer k"}
        async with httpx.AsyncClient(base_url=server.urls[0], verify=False, headers=headers) as client:
            assert (await client.get("/model_info")).json()["model_path"] == "main's"


def test_on_uvloop(folder: Path) -> None:
    async def talk() -> None:
        async with running(folder) as server, server.http(0) as client:
            assert (await client.get("/model_info")).json()["model_path"] == "main's"
            owner = server.fronts[1]
            server.fronts[0].elsewhere, owner.step_s, owner.endless = [1], 0.002, True
            request = asyncio.create_task(client.post("/generate", json=LONG))
            await until(lambda: owner.steps > 3)
            request.cancel()
            await until(lambda: owner.aborted == ["r"])
            owner.endless = False
            reply = await client.post("/generate", json={**LONG, "text": "é" * 50})
            assert events_of(reply.text)[-1]["text"].startswith("abcdefgh")
            refused = await client.post("/generate", json={"text": "é" * (5 << 19)})
            assert refused.status_code == 400
            await server.end(1)
            assert (await client.post("/generate", json=LONG)).status_code == 503

    uvloop.run(talk())


# --- what fronts keep


async def test_responses_are_found_from_everywhere(server: Server) -> None:
    here, there = server.openai(0), server.openai(1)
    first = await here.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert first.id.startswith("resp_0_")
    assert (await there.responses.retrieve(first.id)).output_text == "abc"
    second = await there.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert second.id.startswith("resp_0_")
    assert [len(service.requests) for service in server.fronts] == [2, 0]
    messages = server.fronts[0].templated[-1]["messages"]
    assert [message["content"] for message in messages] == ["hello", "abc", "And?"]
    stream = await there.responses.create(model=MODEL, input="Or?", previous_response_id=second.id, stream=True)
    events = [event async for event in stream]
    assert (events[0].type, events[-1].response.output_text) == ("response.created", "abcdefgh")
    assert (await there.responses.create(model=MODEL, input="x")).id.startswith("resp_1_")
    await there.responses.delete(first.id)
    for client in (here, there):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve(first.id)
        assert missing.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
        assert missing.value.param == "previous_response_id"
    for lost in ("resp_2_x", "resp_x_y", "resp_", "resp_1", "resp_-1_x", "resp_٠_x"):
        with pytest.raises(openai.NotFoundError):
            await there.responses.retrieve(lost)
    await server.end(0)
    with pytest.raises(openai.InternalServerError, match="Front process 0"):
        await there.responses.retrieve(second.id)


async def test_a_response_in_the_background(server: Server) -> None:
    here, there = server.openai(0), server.openai(1)
    server.fronts[0].endless, server.fronts[0].step_s = True, 0.002
    running = await here.responses.create(model=MODEL, input="hello", background=True)
    await until(lambda: server.fronts[0].steps > 3)
    assert (await there.responses.retrieve(running.id)).status == "in_progress"
    assert (await there.responses.cancel(running.id)).status == "cancelled"
    await until(lambda: len(server.fronts[0].aborted) == 1)
    again = await here.responses.create(model=MODEL, input="hello", background=True)
    await there.responses.delete(again.id)
    await until(lambda: server.fronts[0].num_live == 0)


async def test_a_failure_at_the_owner(server: Server) -> None:
    server.fronts[0].elsewhere = [1]
    server.fronts[1].fail_after = (3, FinishReason.abort("Ran too long.", 503))
    with pytest.raises(openai.APIError, match="Ran too long"):
        async for _ in await server.openai(0).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        ):
            pass


async def test_models_say_the_same_everywhere(server: Server) -> None:
    for front in range(2):
        async with server.http(front) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["created"] == 123
