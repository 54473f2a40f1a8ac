"""Wires: what a streamed reply writes its bytes to, between the head and the end that it sends as every ASGI reply does.

A DirectWire writes to the connection's transport at once; `StreamingProtocol`, our HTTP protocol plus the offer of such a wire
in each request's scope, tells it when the connection cannot take more. Under any other ASGI server an AsgiWire hands the bytes
to `send`, one message at a time. Wires know bytes, neither events nor requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import socket
import sys
import termios
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jaxserve.server.http.bounded_protocol import BoundedProtocol

logger = logging.getLogger(__name__)

_EXTENSION = "jaxserve.wire"


class Wire(Protocol):
    """Between `open` and `close` it may be written to while `is_writable`; `on_writable` is called when that has come back."""

    is_writable: bool

    def open(self, first: bytes, on_writable: Callable[[], None]) -> None:
        """The reply's head has been sent; `first`, if not empty, follows."""

    def write(self, data: bytes) -> None:
        """A part of the body. Never waits; data is not empty."""

    async def close(self) -> None:
        """From here on ordinary sends go on with the reply."""


def prepare_wire(scope: Scope, send: Send, stall_timeout_s: float) -> Wire:
    """To be called before the reply's head is sent."""
    direct = scope.get("extensions", {}).get(_EXTENSION)
    return AsgiWire(send) if direct is None else direct(stall_timeout_s)


class DirectWire:
    """Writes to the transport. Its buffer holds at most the high-water mark and one write; then the connection pauses.

    A reader that takes nothing for `stall_timeout_s` while the connection is paused loses the connection.
    """

    def __init__(
        self, protocol: StreamingProtocol, cycle_of: weakref.ref[RequestResponseCycle], stall_timeout_s: float
    ) -> None:
        self.is_writable = False
        self._protocol = protocol
        self._transport = protocol.transport
        self._stall_timeout_s = stall_timeout_s
        self._stall_check: asyncio.TimerHandle | None = None
        self._on_writable: Callable[[], None] | None = None
        cycle = cycle_of()
        assert cycle is not None, "a wire is asked for after its request"
        self._is_chunked = cycle.scope["http_version"] != "1.0"
        if not self._is_chunked:
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
        self._on_writable = None  # a stalled end of the reply is still watched

    def pause(self) -> None:
        self.is_writable = False
        if self._stall_check is None:
            self._watch_progress()

    def resume(self) -> None:
        self._stop_watching()
        if self._on_writable is not None:
            self.is_writable = True
            self._on_writable()

    def lose(self) -> None:
        self.is_writable = False
        self._on_writable = None
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._stall_check is not None:
            self._stall_check.cancel()
            self._stall_check = None

    def _watch_progress(self) -> None:
        untaken = self._untaken_bytes()
        self._stall_check = self._protocol.loop.call_later(self._stall_timeout_s, self._check_progress, untaken)

    def _untaken_bytes(self) -> int:
        """What has been written and the client's machine has not acknowledged."""
        return self._transport.get_write_buffer_size() + _unacknowledged_bytes(self._transport.get_extra_info("socket"))

    def _check_progress(self, untaken_before: int) -> None:
        if self._untaken_bytes() < untaken_before:
            self._watch_progress()
            return
        self._stall_check = None
        logger.warning(
            "A client took nothing of its stream for %g s (--stream-stall-timeout-s): closing its connection.",
            self._stall_timeout_s,
        )
        self._transport.abort()


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """In the kernel's send queue, which may hold megabytes; 0 where the system does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


class StreamingProtocol(BoundedProtocol):
    """The protocol of one connection; requests find a DirectWire in their scope."""

    wire: DirectWire | None = None  # the one opened last

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            # Weak: else each request would be a cycle of references, left to the garbage collector.
            wire = functools.partial(DirectWire, self, weakref.ref(self.cycle))
            self.scope["extensions"] = cast(dict[str, Any], {_EXTENSION: wire})

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
