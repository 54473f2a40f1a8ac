"""EventStream: a reply of events, each written when the message that brings its chunk arrives.

    LiveCall -> _Delivery.push -> EventWriter.push (chunk to bytes: the protocol) -> Wire.write (bytes to the connection)

No task and no queue stands between a chunk and its bytes. Chunks wait only until the head is sent and while the connection
cannot take more; what waits is merged, one chunk per sequence. The task of the request sleeps meanwhile: it sends the head when
the first chunk is there, and the end after the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.elsewhere import AnsweredElsewhere
from jaxserve.server.http.connection import unless_disconnected
from jaxserve.server.http.errors import as_request_error, error_response
from jaxserve.server.http.wire import Wire, wire_of
from jaxserve.server.requests import GenerationChunk, RequestError
from jaxserve.server.sinks import ChunkMerger, ChunkSink


class EventWriter(Protocol):
    """A protocol's events of one request."""

    def push(self, chunk: GenerationChunk) -> bytes:
        """The events of a chunk; empty if there is nothing to say yet. Raises RequestError if the request has failed."""

    def end(self) -> bytes:
        """What follows the last chunk."""

    def error(self, error: RequestError) -> bytes:
        """How a failure after the first chunk is told. Nothing follows."""


class EventReply(Response):
    """A reply of events. The status line waits for the first chunk, so a request refused before it began gets an ordinary
    error reply."""

    def __init__(self, writer: EventWriter, media_type: str = "text/event-stream") -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Response set a length for its empty body; a stream has none.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _begin(self, wire: Wire, send: Send) -> None:
        wire.prepare()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


class EventStream(EventReply):
    def __init__(
        self,
        writer: EventWriter,
        open_stream: Callable[[ChunkSink], AbstractAsyncContextManager[None]],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(writer, media_type)
        self._open_stream = open_stream

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = wire_of(scope, send)
        delivery = _Delivery(self._writer, wire)
        try:
            async with self._open_stream(delivery):
                await delivery.begun.wait()
                first = delivery.take()  # it may be an error: then the head is another
                await self._begin(wire, send)
                delivery.open(first)
                await delivery.done.wait()
        except AnsweredElsewhere:
            raise
        except Exception as error:
            delivery.fail(error)
        if not delivery.is_open:
            assert delivery.error is not None, "a stream ended before its head was sent, without an error"
            await error_response(scope["path"], as_request_error(delivery.error))(scope, receive, send)
            return
        await wire.close()
        last_words = b"" if delivery.error is None else self._writer.error(as_request_error(delivery.error))
        await send({"type": "http.response.body", "body": last_words, "more_body": False})


class _Delivery:
    """The sink of a stream."""

    __slots__ = ("_ended", "_waiting", "_wire", "_writer", "begun", "done", "error", "is_open")

    def __init__(self, writer: EventWriter, wire: Wire) -> None:
        self.begun = asyncio.Event()  # something waits for the head to be sent
        self.done = asyncio.Event()  # everything is written, or `error` says why not
        self.is_open = False
        self.error: Exception | None = None
        self._writer = writer
        self._wire = wire
        self._waiting = ChunkMerger()
        self._ended = False

    def push(self, chunk: GenerationChunk) -> None:
        if self.error is not None:
            return
        if not self._wire.is_writable:
            self._waiting.add(chunk)
            self.begun.set()
            return
        try:
            data = self._writer.push(chunk)
            if data:
                self._wire.write(data)
        except Exception as error:
            self.fail(error)

    def end(self) -> None:
        self._ended = True
        if self._wire.is_writable:
            self._flush()

    def open(self, first: bytes) -> None:
        """The head has been sent; `first` comes next."""
        self.is_open = True
        self._wire.open(first, self._flush)
        if self._wire.is_writable:
            self._flush()

    def take(self) -> bytes:
        """The events of what waits, and of the end if it has come."""
        events = [self._writer.push(chunk) for chunk in self._waiting.take()]
        if self._ended and not self.done.is_set():
            events.append(self._writer.end())
            self.done.set()
        return b"".join(events)

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
        self.done.set()

    def _flush(self) -> None:
        try:
            data = self.take()
        except Exception as error:
            self.fail(error)
            return
        if data:
            self._wire.write(data)
