"""What a connection may cost, through real sockets: heads, bodies, time, numbers. See also test_http_descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fake_service import FakeService
from http_harness import live_server, self_signed, until

from jaxserve.server.http.connection_limits import Admission, ConnectionLimits, RareWarnings

LIMITS = ConnectionLimits(max_connections=1000)
QUICK = ConnectionLimits(max_connections=1000, head_timeout_s=0.3, body_window_s=0.3, body_window_bytes=1000)
HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"text": "x", "sampling_params": {"max_new_tokens": 2}}'
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
PING = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, timeout_s: float = 5) -> tuple[int, bytes]:
        """Status and body of one reply with a length."""
        async with asyncio.timeout(timeout_s):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def rest(self, timeout_s: float = 5) -> bytes:
        """What comes until the server has closed the connection."""
        async with asyncio.timeout(timeout_s):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def padded_body(size: int) -> bytes:
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


async def answers(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url) as client:
        return (await client.get("/health")).status_code == 200


# --- sizes


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (HEAD + b"X: " + b"x" * (80 << 10), 431, "at most 65536 bytes"),
        (HEAD + b"X: " + b"x" * (70 << 10) + b"\r\n\r\n", 431, "at most 65536 bytes"),
        (HEAD + b"x" * (80 << 10), 431, "at most 65536 bytes"),
        (HEAD + b"".join(b"X-%d: x\r\n" % i for i in range(300)), 431, "at most 256 headers"),
        (b"\r\n" * (40 << 10), 431, "at most 65536 bytes"),
        (b"GET /" + b"x" * (9 << 10), 414, "at most 8192 bytes"),
        (b"GET /v1/models/" + b"x" * (9 << 10) + b" HTTP/1.1\r\n\r\n", 414, "at most 8192 bytes"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "not HTTP"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400, "not HTTP"),
        (b"GET http://[::1 HTTP/1.1\r\n\r\n", 400, "path cannot be read"),
        (b"GET http://a HTTP/1.1\r\n\r\n", 400, "path cannot be read"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not HTTP"),
        (b"CONNECT example.com:443 HTTP/1.1\r\n\r\n", 405, "no proxy"),
    ],
)
async def test_heads_beyond_the_limits_are_refused(data: bytes, status: int, words: str) -> None:
    async with live_server(FakeService(), limits=LIMITS) as url, connected(url) as client:
        client.send(data)
        got, body = await client.reply()
        assert (got, await client.rest()) == (status, b"")
        assert words in body.decode()
        assert await answers(url)


async def test_heads_within_the_limits_pass() -> None:
    head = b"GET /health?" + b"x" * (8000) + b" HTTP/1.1\r\n" + b"X: " + b"x" * (50 << 10) + b"\r\n"
    head += b"".join(b"X-%d: x\r\n" % i for i in range(200)) + b"\r\n"
    async with live_server(FakeService(), limits=LIMITS) as url, connected(url) as client:
        for _ in range(3):
            client.send(head)
            assert (await client.reply())[0] == 200
        for start in range(0, len(head), 1000):
            client.send(head[start : start + 1000])
            await asyncio.sleep(0)
        assert (await client.reply())[0] == 200


@pytest.mark.parametrize(
    "part", [b"3;" + b"e" * (1 << 20), b"0\r\n" + b"Trailer: x\r\n" * 20_000, b"0\r\nX: " + b"x" * (1 << 20)]
)
async def test_what_frames_a_chunked_body_is_bounded(part: bytes) -> None:
    async with live_server(FakeService(), limits=LIMITS) as url, connected(url) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + part)
        status, body = await client.reply()
        assert (status, await client.rest()) == (400, b"")
        assert "Chunk extensions and trailers may have at most 65536 bytes" in body.decode()


async def test_chunks_of_one_byte_with_extensions_and_trailers_pass() -> None:
    chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in padded_body(100_000)) + b"0\r\nContent-Type: text/plain\r\n\r\n"
    async with live_server(FakeService(), limits=LIMITS) as url, connected(url) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + PING)
        assert (await client.reply())[0] == 200
        assert (await client.reply())[0] == 200


async def test_memory_stays_flat_while_headers_pour_in() -> None:
    async def pour(url: str) -> None:
        async with connected(url) as client:
            client.send(HEAD + b"X: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    client.send(b"x" * 100_000)
                    await client.writer.drain()

    async with live_server(FakeService(), limits=LIMITS) as url:
        await pour(url)
        before = psutil.Process().memory_info().rss
        for _ in range(5):
            await asyncio.gather(*(pour(url) for _ in range(10)))
        assert psutil.Process().memory_info().rss - before < 20 << 20


async def test_the_body_of_a_refused_request_is_not_kept() -> None:
    size = 60 << 20
    async with live_server(FakeService(), limits=LIMITS, api_key="k") as url, connected(url) as client:
        client.send(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        assert (await client.reply())[0] == 401
        before = psutil.Process().memory_info().rss
        for _ in range(size >> 20):
            client.send(b"x" * (1 << 20))
            await client.writer.drain()
        client.send(PING)
        assert (await client.reply())[0] == 200
        assert psutil.Process().memory_info().rss - before < 16 << 20


async def test_broken_requests_end_in_a_reply_or_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """Requests cut, mixed and torn at random: no traceback, nothing is left, and others are served."""
    draw = random.Random(1)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x;e=1\r\n%b\r\n0\r\nT: x\r\n\r\n" % (len(BODY), BODY)
    upgrade = HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}"
    parts = (
        REQUEST,
        PING,
        chunked,
        upgrade,
        HEAD,
        BODY,
        b"\r\n",
        b"\x00\xff",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 ",
    )

    async def attack(url: str) -> None:
        data = bytearray(b"".join(draw.choices(parts, k=draw.randrange(1, 6))))
        for _ in range(draw.randrange(3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        async with connected(url) as client:
            while data:
                size = draw.randrange(1, 200)
                client.send(bytes(data[:size]))
                del data[:size]
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(draw.random() / 2):
                    await client.reader.read()

    service = FakeService()
    async with live_server(service, limits=QUICK) as url:
        for _ in range(20):
            await asyncio.gather(*(attack(url) for _ in range(20)))
        assert await answers(url)
        await until(lambda: service.num_live == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


# --- time


@pytest.mark.parametrize("data", [HEAD, HEAD + b"X", b"GET", b"\r\n"])
async def test_a_head_has_a_deadline(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with live_server(FakeService(), limits=QUICK) as url, connected(url) as client:
        client.send(data)
        status, body = await client.reply()
        assert (status, await client.rest()) == (408, b"")
        assert "headers took longer than 0.3 s" in body.decode()
    assert "Traceback" not in caplog.text


async def test_a_head_that_drips_has_the_same_deadline() -> None:
    async with live_server(FakeService(), limits=QUICK) as url, connected(url) as client:
        reply = asyncio.create_task(client.reply())
        for byte in HEAD:
            if reply.done():
                break
            client.send(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await reply)[0] == 408


async def test_who_connects_and_says_nothing_is_closed_without_a_word() -> None:
    async with live_server(FakeService(), limits=QUICK) as url, connected(url) as client:
        assert await client.rest() == b""


async def test_a_tls_handshake_has_a_deadline(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    async with (
        live_server(FakeService(), limits=QUICK, ssl_certfile=certificate, ssl_keyfile=key) as url,
        connected(url) as client,
    ):
        assert await client.rest() == b""


async def test_the_next_head_has_a_deadline_of_its_own() -> None:
    async with live_server(FakeService(), limits=QUICK) as url, connected(url) as client:
        for _ in range(3):
            client.send(PING)
            assert (await client.reply())[0] == 200
            await asyncio.sleep(0.2)  # between requests no clock runs but that of keep-alive
        client.send(b"GET /hea")
        assert (await client.reply())[0] == 408


@pytest.mark.parametrize("data", [b"", BODY[:10]])
async def test_a_body_without_progress_ends(data: bytes) -> None:
    service = FakeService()
    async with live_server(service, limits=QUICK) as url, connected(url) as client:
        client.send(REQUEST.removesuffix(BODY) + data)
        status, body = await client.reply()
        assert (status, await client.rest()) == (408, b"")
        assert "fewer than 1000 bytes of it came in 0.3 s" in body.decode()
        assert service.requests == []


async def test_a_body_that_drips_ends_and_one_that_flows_does_not() -> None:
    async with live_server(FakeService(), limits=QUICK) as url:
        for piece_bytes, status in ((10, 408), (400, 200)):
            async with connected(url) as client:
                body = padded_body(8000)
                client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
                reply = asyncio.create_task(client.reply())
                for start in range(0, len(body), piece_bytes):
                    if reply.done():
                        break
                    client.send(body[start : start + piece_bytes])
                    await asyncio.sleep(0.03)
                assert (await reply)[0] == status


async def test_a_dripping_body_of_a_request_that_was_answered_ends() -> None:
    async with live_server(FakeService(), limits=QUICK, api_key="k") as url, connected(url) as client:
        client.send(HEAD + b"Content-Length: 1000\r\n\r\n")
        assert (await client.reply())[0] == 401
        for _ in range(50):
            client.send(b"x")
            await asyncio.sleep(0.02)
            if client.reader.at_eof():
                break
        assert await client.rest() == b""


async def test_who_waits_for_a_reply_is_left_alone() -> None:
    service = FakeService()
    service.step_s = 0.6
    async with live_server(service, limits=QUICK) as url, connected(url) as client:
        client.send(REQUEST)
        assert (await client.reply())[0] == 200
        client.send(REQUEST + b"GET /hea")  # the beginning of the next is not punished before its turn
        assert (await client.reply())[0] == 200
        assert (await client.reply())[0] == 408


async def test_a_pipelined_body_waits_for_its_turn() -> None:
    """While the server does not read, nobody's body is late."""
    service = FakeService()
    service.step_s = 0.5
    large = padded_body(4_000_000)
    async with live_server(service, limits=QUICK) as url, connected(url) as client:
        client.send(REQUEST + HEAD + b"Content-Length: %d\r\n\r\n" % len(large) + large)
        assert (await client.reply())[0] == 200
        assert (await client.reply())[0] == 200


async def test_a_server_that_ends_waits_for_no_body(caplog: pytest.LogCaptureFixture) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with live_server(FakeService(), limits=LIMITS) as url:
            client = await stack.enter_async_context(connected(url))
            client.send(REQUEST[:-3])
            await asyncio.sleep(0.1)
        assert (await client.reply())[0] == 503
    assert not caplog.records


# --- order


async def test_garbage_behind_a_request_ends_it() -> None:
    service = FakeService()
    service.endless, service.step_s = True, 0.002
    async with live_server(service, limits=LIMITS) as url, connected(url) as client:
        client.send(REQUEST)
        await until(lambda: service.steps > 2)
        client.send(b"\x00\x01 garbage\r\n\r\n")
        assert await client.rest() == b"", "no reply that could be taken for the request's"
        await until(lambda: len(service.aborted) == 1)


async def test_who_leaves_aborts_the_first_of_pipelined_requests() -> None:
    service = FakeService()
    service.endless, service.step_s = True, 0.002
    async with live_server(service, limits=LIMITS) as url, connected(url) as client:
        client.send(REQUEST * 3)
        await until(lambda: service.steps > 2)
        client.writer.transport.abort()
        await until(lambda: len(service.aborted) == 1)
        assert service.num_live == 0


async def test_pipelined_requests_are_bounded() -> None:
    service = FakeService()
    service.step_s = 0.05
    async with live_server(service, limits=LIMITS) as url:
        async with connected(url) as client:
            client.send(REQUEST + PING * 30)
            for _ in range(31):
                assert (await client.reply())[0] == 200
        async with connected(url) as client:
            client.send(REQUEST + PING * 1000)
            assert await client.rest() == b""


async def test_expecting_clients_are_told_to_go_on() -> None:
    async with live_server(FakeService(), limits=LIMITS) as url, connected(url) as client:
        client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(BODY)
        assert (await client.reply())[0] == 200


@pytest.mark.parametrize("wish", [b"websocket", b"h2c"])
async def test_upgrades_are_served_as_plain_requests(wish: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A browser's WebSocket gets an ordinary error; Java's client, which asks for HTTP/2 in each request, gets its reply."""
    headers = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\nUpgrade: %b\r\n" % wish
    handshake = b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-WebSocket-Version: 13\r\n"
    post = HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(BODY)
    async with live_server(FakeService(), limits=LIMITS) as url, connected(url) as client:
        for _ in range(2):
            client.send(handshake + headers + b"\r\n")
            assert (await client.reply())[0] == 404
            client.send(post + BODY + post)
            assert (await client.reply())[0] == 200
            client.send(BODY + PING)
            assert (await client.reply())[0] == 200
            assert (await client.reply())[0] == 200
    assert not caplog.records


# --- numbers


async def test_connections_beyond_the_limit_get_503_and_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService()
    service.endless, service.step_s = True, 0.01
    async with live_server(service, limit_concurrency=3) as url, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(url)) for _ in range(3)]
        for client in busy:
            client.send(REQUEST)
        await until(lambda: len(service.requests) == 3)
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                async with connected(url) as refused:
                    assert (await refused.reply())[0] == 503
                    assert await refused.rest() == b""
        assert len(caplog.records) == 1, caplog.text
        assert "3 are open and have requests, the most there may be (--limit-concurrency)" in caplog.text
        busy[0].writer.transport.abort()
        await until(lambda: len(service.aborted) == 1)
        assert await answers(url)


async def test_who_sends_nothing_makes_room_for_others() -> None:
    limits = ConnectionLimits(max_connections=20, make_room_after_s=0)
    service = FakeService()
    async with live_server(service, limits=limits) as url, contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(url)) for _ in range(20)]
        for client in silent:
            client.send(HEAD)
        for _ in range(3):
            assert await answers(url)
        assert ((await silent[0].reply())[0], await silent[0].rest()) == (503, b"")
        silent[-1].send(b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert (await silent[-1].reply())[0] == 200


class FakeConnection:
    def __init__(self) -> None:
        self.made_room = False

    def make_room(self) -> None:
        self.made_room = True


def test_only_who_was_idle_for_a_while_makes_room() -> None:
    admission = Admission(ConnectionLimits(max_connections=2, make_room_after_s=3600))
    first, second, third = FakeConnection(), FakeConnection(), FakeConnection()
    assert admission.admit(first)
    assert admission.admit(second)
    assert not admission.admit(third)
    admission.leave(first)
    assert admission.admit(third)
    assert (admission.num_open, first.made_room, second.made_room) == (2, False, False)


def test_rare_warnings_count_what_they_leave_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s: list[float] = [100.0]
    clock: Callable[[], Any] = lambda: now_s[0]  # noqa: E731
    monkeypatch.setattr("jaxserve.server.http.connection_limits.time.monotonic", clock)
    warnings = RareWarnings(every_s=5)
    for second in range(12):
        now_s[0] = 100.0 + second
        warnings.warn("Refused %d.", second)
    assert [record.message for record in caplog.records] == [
        "Refused 0.",
        "Refused 5. (and 4 more since the last such line)",
        "Refused 10. (and 4 more since the last such line)",
    ]
