"""Wires: what a streamed reply writes its bytes to, between the head and the end that it sends as every ASGI reply does.

A DirectWire writes to the connection's transport at once; `StreamingProtocol`, our HTTP protocol plus the offer of such a wire
in each request's scope, tells it when the connection cannot take more. Under any other ASGI server an AsgiWire hands the bytes
to `send`, one message at a time. Wires know bytes, neither events nor requests.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jaxserve.server.http.bounded_protocol import BoundedProtocol

_EXTENSION = "jaxserve.wire"


class Wire(Protocol):
    """Between `open` and `close` it may be written to while `is_writable`; `on_writable` is called when that has come back."""

    is_writable: bool

    def prepare(self) -> None:
        """To be called before the head of a reply that is written to it is sent."""

    def open(self, first: bytes, on_writable: Callable[[], None]) -> None:
        """The reply's head has been sent; `first`, if not empty, follows."""

    def write(self, data: bytes) -> None:
        """A part of the body. Never waits; data is not empty."""

    async def close(self) -> None:
        """From here on ordinary sends go on with the reply."""


def wire_of(scope: Scope, send: Send) -> Wire:
    """That of a request, whose reply may also turn out to be one that needs none."""
    direct = scope.get("extensions", {}).get(_EXTENSION)
    return AsgiWire(send) if direct is None else direct()


class DirectWire:
    """Writes to the transport. Its buffer holds at most the high-water mark and one write; then the connection pauses."""

    def __init__(self, protocol: StreamingProtocol, cycle_of: weakref.ref[RequestResponseCycle]) -> None:
        self.is_writable = False
        self._protocol = protocol
        self._transport = protocol.transport
        self._on_writable: Callable[[], None] | None = None
        self._cycle_of = cycle_of
        self._is_chunked = True

    def prepare(self) -> None:
        cycle = self._cycle_of()
        assert cycle is not None, "a wire is prepared after its request"
        if cycle.scope["http_version"] == "1.0":
            self._is_chunked = False
            cycle.chunked_encoding = False  # uvicorn would send chunks to HTTP/1.0; the end of the connection ends the body

    def open(self, first: bytes, on_writable: Callable[[], None]) -> None:
        if self._transport.is_closing():
            return  # the client has left, which ends the request
        self._on_writable = on_writable
        self._protocol.wire = self
        self.is_writable = True
        if first:
            self.write(first)
        if self._protocol.flow.write_paused:
            self.pause()

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def close(self) -> None:
        self.is_writable = False
        self._on_writable = None

    def pause(self) -> None:
        self.is_writable = False

    def resume(self) -> None:
        if self._on_writable is not None:
            self.is_writable = True
            self._on_writable()

    def lose(self) -> None:
        self.is_writable = False
        self._on_writable = None


class StreamingProtocol(BoundedProtocol):
    """The protocol of one connection; requests find a DirectWire in their scope."""

    wire: DirectWire | None = None  # the one opened last

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            # Weak: else each request would be a cycle of references, left to the garbage collector.
            wire = functools.partial(DirectWire, self, weakref.ref(self.cycle))
            extensions = cast(dict[str, Any], self.scope.setdefault("extensions", {}))
            extensions[_EXTENSION] = wire

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.wire is not None:
            self.wire.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.wire is not None:
            self.wire.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.wire is not None:
            self.wire.lose()
            self.wire = None
        self.scope = None  # type: ignore[assignment]  # it refers to this object


class AsgiWire:
    """Hands bytes to `send`; while one message is being sent, the wire is not writable."""

    def __init__(self, send: Send) -> None:
        self.is_writable = False
        self._send = send
        self._on_writable: Callable[[], None] | None = None
        self._sending: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        pass

    def open(self, first: bytes, on_writable: Callable[[], None]) -> None:
        self._on_writable = on_writable
        self.is_writable = True
        if first:
            self.write(first)

    def write(self, data: bytes) -> None:
        self.is_writable = False
        self._sending = asyncio.ensure_future(self._send_one(data))

    async def close(self) -> None:
        self._on_writable = None
        if self._sending is not None:
            await self._sending

    async def _send_one(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if self._on_writable is not None:
            self.is_writable = True
            self._on_writable()


class Outlet:
    """Opens a wire, for whoever waits until it can be written to."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._writable = asyncio.Event()
        wire.open(b"", self._writable.set)

    async def close(self) -> None:
        await self._wire.close()

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)  # a turn for others: the connection may take one block after the other
        while not self._wire.is_writable:
            self._writable.clear()
            await self._writable.wait()
        self._wire.write(data)
