"""HTTP over a bare connection, so that a client can do what no HTTP library lets it do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

REPLY_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back. status is None if the connection ended before a status line; whole says that it ended by itself."""

    status: int | None
    content_type: str
    body: bytes
    whole: bool


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def post_json(path: str, body: Any) -> bytes:
    return post(path, json.dumps(body).encode())


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed at the end, without waiting for anything that was not sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends the connection with a RST instead of a FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def exchange(port: int, request: bytes, timeout_s: float = REPLY_TIMEOUT_S) -> Reply:
    """The reply to one request that says Connection: close. Raises TimeoutError, and OSError if there is no connection."""
    async with asyncio.timeout(timeout_s), connected(port) as (reader, writer):
        writer.write(request)
        return await read_reply(reader)


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Everything until the connection ends."""
    parts = []
    whole = True
    try:
        while part := await reader.read(2**16):
            parts.append(part)
    except OSError:  # reset by the server, which had not read all of the request: what it said before counts
        whole = False
    return parse_reply(b"".join(parts), whole)


def parse_reply(data: bytes, whole: bool = True) -> Reply:
    """The last reply that is no 1xx. Of several pipelined replies, the first."""
    while data.startswith(b"HTTP/1.1 1"):
        data = data.partition(b"\r\n\r\n")[2]
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not data.startswith(b"HTTP/") or len(words) < 2 or not words[1].isdigit():
        return Reply(None, "", data, whole)
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        body = _unchunk(body)
    return Reply(int(words[1]), fields.get(b"content-type", b"").strip().decode(errors="replace"), body, whole)


def _unchunk(data: bytes) -> bytes:
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            return b"".join(parts)
        if length == 0:
            return b"".join(parts)
        parts.append(data[:length])
        data = data[length + 2 :]
