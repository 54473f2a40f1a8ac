"""The relay: asks another process of this server over its Unix socket, and hands on its reply as it comes.

    scope and body -> HTTP/1.1, one request per connection -> the other process -> httptools -> ASGI messages

Nothing has a time limit: a generation takes as long as it takes. Cancelling the relay closes the connection, which tells the
other process that the client has left.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httptools
from starlette.types import Scope, Send

from jaxserve.server.http.wire import Outlet, wire_of

_READ_BYTES = 1 << 16
# What is about one connection, and said anew on the next.
_OF_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
# What a web page may do was decided where it asked, which also adds the headers that tell it.
_OF_PAGES = frozenset((b"origin", b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"sec-fetch-user"))
_NOT_ASKED = _OF_CONNECTION | _OF_PAGES | {b"content-length", b"expect"}
_NOT_ANSWERED = _OF_CONNECTION | {b"date", b"server"}


def request_head(scope: Scope, root_path: str, num_body_bytes: int) -> bytes:
    """`root_path`: what was taken off the path, and is taken off once more."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    first = b"%b %b%b%b HTTP/1.1\r\n" % (scope["method"].encode(), root_path.encode(), scope["raw_path"], query)
    headers = [header for header in scope["headers"] if header[0] not in _NOT_ASKED]
    headers += [(b"connection", b"close"), (b"content-length", b"%d" % num_body_bytes)]
    return first + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"


async def relay(path: Path, request: list[bytes], reply: Reply) -> None:
    """To the end of the reply. Raises OSError, EOFError or HttpParserError if it does not come to that."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        for part in request:
            writer.write(part)
            await writer.drain()
        request.clear()  # the reply may take a while
        while not reply.is_whole:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise EOFError("the reply has no end")
            await reply.take_in(data)
    finally:
        writer.transport.abort()


class Reply:
    """Its bytes go in, ASGI messages come out; what starts with `on_` is called by the parser."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.has_begun = False  # its head was sent to the client
        self.is_whole = False
        self._scope = scope
        self._send = send
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_head = False
        self._parts: list[bytes] = []  # of the body, not sent yet
        self._outlet: Outlet | None = None  # where the body goes if its length is not known

    async def take_in(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if not self._has_head:
            return
        if not self.has_begun:
            await self._begin()
        body = b"".join(self._parts)
        self._parts.clear()
        if body and self._outlet is not None:
            await self._outlet.write(body)
        elif body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if self.is_whole:
            if self._outlet is not None:
                await self._outlet.close()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        self.has_begun = True
        wire = None
        if not any(name == b"content-length" for name, _ in self._headers):
            wire = wire_of(self._scope, self._send)
            wire.prepare()
        status = self._parser.get_status_code()
        await self._send({"type": "http.response.start", "status": status, "headers": self._headers})
        self._outlet = None if wire is None else Outlet(wire)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _NOT_ANSWERED and not self._has_head:  # behind the body come trailers
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True
        self.is_whole = self._scope["method"] == "HEAD"

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = True
