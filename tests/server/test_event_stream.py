"""EventStream over a wire that tests open and close: what is written when, what waits, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxserve.server.http.event_stream import EventStream
from jaxserve.server.requests import GenerationChunk, RequestError
from jaxserve.server.sinks import ChunkSink
from jaxserve.types import FinishReason

END = FinishReason.stop(0)


def chunk(text: str, *, index: int = 0, reason: FinishReason | None = None) -> GenerationChunk:
    return GenerationChunk(index, f"r{index}", text, [1], [], 1, 1, 0, reason)


class PlainWriter:
    def push(self, chunk: GenerationChunk) -> bytes:
        if chunk.text == "crash":
            raise ValueError("this text cannot be written")
        if chunk.finish_reason is not None and chunk.finish_reason.type == "abort":
            raise RequestError("The server failed.", 503, "ServiceUnavailableError")
        return f"<{chunk.text}>".encode()

    def end(self) -> bytes:
        return b"<end>"

    def error(self, error: RequestError) -> bytes:
        return f"<{error.message}>".encode()


class FakeWire:
    def __init__(self) -> None:
        self.is_writable = False
        self.written: list[bytes] = []
        self._on_writable: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        pass

    def open(self, first: bytes, on_writable: Callable[[], None]) -> None:
        self.is_writable, self._on_writable = True, on_writable
        if first:
            self.write(first)

    def write(self, data: bytes) -> None:
        assert self.is_writable
        assert data
        self.written.append(data)

    async def close(self) -> None:
        self.is_writable = False

    def resume(self) -> None:
        self.is_writable = True
        self._on_writable()


class Stream:
    """One EventStream being answered, and everything that came out of it."""

    def __init__(self, *, direct: bool = True, refuse: Exception | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = False
        self.wire: FakeWire | None = None
        self._refuse = refuse
        self._gone = asyncio.Event()
        scope = {"type": "http", "path": "/generate", "method": "POST"}
        if direct:
            scope["extensions"] = {"jaxserve.wire": self._make_wire}  # type: ignore[assignment]
        response = EventStream(PlainWriter(), self._open)
        self.task = asyncio.create_task(response(scope, self._receive, self._send))

    @property
    def body(self) -> bytes:
        written = self.wire.written if self.wire is not None else []
        return b"".join(written) + b"".join(message.get("body", b"") for message in self.sent)

    def leave(self) -> None:
        self._gone.set()

    def _make_wire(self) -> FakeWire:
        self.wire = FakeWire()
        return self.wire

    @contextlib.asynccontextmanager
    async def _open(self, sink: ChunkSink) -> AsyncIterator[None]:
        if self._refuse is not None:
            raise self._refuse
        self.sink = sink
        try:
            yield
        finally:
            self.left = True

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(**options: Any) -> Stream:
    """A stream whose first chunk is written."""
    stream = Stream(**options)
    await turns()
    stream.sink.push(chunk("a"))
    await turns()
    assert stream.sent[0]["type"] == "http.response.start"
    return stream


async def test_a_chunk_is_written_in_the_turn_it_comes() -> None:
    stream = await begun()
    wire = stream.wire
    assert wire is not None
    assert wire.written == [b"<a>"]
    stream.sink.push(chunk("b"))
    assert wire.written == [b"<a>", b"<b>"], "no task stood in between"
    stream.sink.push(chunk("c", reason=END))
    stream.sink.end()
    assert wire.written[2:] == [b"<c>", b"<end>"]
    await stream.task
    assert stream.sent[1:] == [{"type": "http.response.body", "body": b"", "more_body": False}]
    assert stream.left


async def test_what_comes_before_the_head_is_merged_behind_it() -> None:
    stream = Stream()
    await turns()
    for text in "abc":
        stream.sink.push(chunk(text))
    assert stream.sent == []
    await turns()
    assert stream.wire is not None
    assert stream.wire.written == [b"<abc>"]
    stream.leave()
    await stream.task


async def test_only_a_connection_that_is_full_merges() -> None:
    stream = await begun()
    wire = stream.wire
    assert wire is not None
    wire.is_writable = False
    for text in "bcd":
        stream.sink.push(chunk(text))
        stream.sink.push(chunk(text.upper(), index=1))
    assert wire.written == [b"<a>"]
    wire.resume()
    assert wire.written == [b"<a>", b"<bcd><BCD>"], "one chunk per sequence, one write"
    stream.sink.push(chunk("e"))
    assert wire.written[-1] == b"<e>"
    wire.is_writable = False
    stream.sink.push(chunk("f", reason=END))
    stream.sink.push(chunk("F", index=1, reason=END))
    stream.sink.end()
    await turns()
    assert not stream.task.done(), "the end waits too"
    wire.resume()
    assert wire.written[-1] == b"<f><F><end>"
    await stream.task


async def test_a_request_that_ends_at_once() -> None:
    stream = Stream()
    await turns()
    stream.sink.push(chunk("a", reason=END))
    stream.sink.end()
    await stream.task
    assert stream.body == b"<a><end>"
    assert stream.sent[-1]["more_body"] is False


async def test_an_error_before_the_head_is_an_error_reply() -> None:
    refused = Stream(refuse=RequestError("The prompt is too long."))
    await refused.task
    failed = Stream()
    await turns()
    failed.sink.push(chunk("", reason=FinishReason.abort("no", 503)))
    await failed.task
    assert failed.left
    assert [stream.sent[0]["status"] for stream in (refused, failed)] == [400, 503]


async def test_an_error_in_a_stream_ends_it_with_an_event() -> None:
    for text, reason, message in (
        ("crash", None, b"<Internal server error; the server's log says more.>"),
        ("", FinishReason.abort("no", 503), b"<The server failed.>"),
    ):
        stream = await begun()
        stream.sink.push(chunk(text, reason=reason))
        stream.sink.push(chunk("late"))
        await stream.task
        assert stream.left, "what still runs is aborted"
        assert stream.sent[-1]["more_body"] is False
        assert stream.sent[-1]["body"] == message
        assert stream.wire is not None
        assert stream.wire.written == [b"<a>"], "nothing follows the error"


async def test_a_client_that_leaves_ends_the_request_and_nothing_more_is_sent() -> None:
    stream = await begun()
    stream.leave()
    await stream.task
    assert stream.left
    assert len(stream.sent) == 1


async def test_without_a_wire_ordinary_sends_carry_the_events() -> None:
    stream = await begun(direct=False)
    stream.sink.push(chunk("b"))
    stream.sink.push(chunk("c"))
    await turns()
    stream.sink.push(chunk("d", reason=END))
    stream.sink.end()
    await stream.task
    bodies = [message["body"] for message in stream.sent[1:]]
    assert bodies == [b"<a>", b"<bc>", b"<d><end>", b""] or b"".join(bodies) == b"<a><b><c><d><end>"
    assert [message.get("more_body") for message in stream.sent[1:]] == [True] * (len(bodies) - 1) + [False]
