"""Bytes that are no HTTP, or HTTP that says two things: the reply is 4xx or none, never 5xx, and nobody else notices.

Each case makes the pieces of one connection: bytes to send, and seconds to wait between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from benchmarks.abuse.arena import Action, Arena
from benchmarks.abuse.connection import connected, parse_reply, post, reset

Pieces = list[bytes | float]

_PATIENCE_S = 2.0  # for a reply; then we leave, since many of these are waiting for more, and rightly
_BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'
_HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def _request_line(draw: random.Random) -> Pieces:
    lines = [
        "",
        " ",
        "GET",
        "GET /",
        "GET / HTTP/9.9",
        "GET / HTTP/1.0",
        "G\x00T / HTTP/1.1",
        "GET  / HTTP/1.1",
        "get / http/1.1",
        "/ GET",
    ]
    lines += [
        "GET / FTP/1.1",
        "BREW /pot HTTP/1.1",
        "CONNECT a:1 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "TRACE / HTTP/1.1",
        "GET http://a/ HTTP/1.1",
    ]
    lines += [
        "GET /%00 HTTP/1.1",
        "GET /../../etc/passwd HTTP/1.1",
        "GET /%2e%2e/%2e%2e/x HTTP/1.1",
        "GET /%zz%ff HTTP/1.1",
        "HEAD /health HTTP/1.1",
    ]
    lines += ["GET /" + "a" * draw.choice([5_000, 70_000, 1_000_000]) + " HTTP/1.1", "GET /?" + "a=b&" * 50_000 + " HTTP/1.1"]
    return [draw.choice(lines).encode("latin-1") + draw.choice([b"\r\n", b"\n", b"\r"]) + b"Host: x\r\n\r\n"]


def _noise(draw: random.Random) -> Pieces:
    return [draw.randbytes(draw.choice([1, 100, 10_000])), b"\x16\x03\x01\x02\x00\x01\x00" + draw.randbytes(200)][
        draw.randrange(2) :
    ]


def _bad_header(draw: random.Random) -> Pieces:
    bad = [
        b"NoColon\r\n",
        b": empty\r\n",
        b"A\x00B: c\r\n",
        b"A: b\x00c\r\n",
        b"A: b\r\n folded\r\n",
        b"A : b\r\n",
        b"A: \xff\xfe\r\n",
        b"A: b\rc\r\n",
    ]
    bad += [
        b"Host: y\r\n",
        b"Host: \r\n",
        b"Expect: 100-continue\r\n",
        b"Expect: miracles\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Origin: null\r\n",
    ]
    bad += [
        b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n",
    ]
    bad += [
        b"Content-Type: text/plain; charset=utf-32\r\n",
        b"Authorization: Bearer " + b"x" * 5000 + b"\r\n",
        b"Cookie: " + b"a=b; " * 1000 + b"\r\n",
    ]
    return [_HEAD + draw.choice(bad) + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY]


def _huge_headers(draw: random.Random) -> Pieces:
    if draw.random() < 0.5:
        return [_HEAD + b"A: " + b"x" * draw.choice([20_000, 70_000, 2_000_000]) + b"\r\n\r\n"]
    return [_HEAD + b"".join(b"H%d: v\r\n" % i for i in range(draw.choice([200, 5_000, 50_000]))) + b"\r\n"]


def _bad_length(draw: random.Random) -> Pieces:
    length = draw.choice(
        [b"-1", b"+5", b"5 5", b"0x10", b"1e3", b"", b"9" * 30, b"18446744073709551617", b"5, 5", b"5\r\nContent-Length: 6"]
    )
    return [_HEAD + b"Content-Length: " + length + b"\r\n\r\n" + _BODY]


def _other_length(draw: random.Random) -> Pieces:
    """More than was said (the rest is the next request), or less (we leave before the end)."""
    length = len(_BODY) + draw.choice([-20, -1, 1, 1000, 10**7])
    return [_HEAD + b"Content-Length: %d\r\n\r\n" % length + _BODY]


def _bad_chunks(draw: random.Random) -> Pieces:
    chunks = [
        b"zz\r\nab\r\n0\r\n\r\n",
        b"-1\r\n\r\n",
        b"ffffffffffffffffff\r\nab",
        b"5\r\nabcdefgh\r\n0\r\n\r\n",
        b"2;" + b"x" * 100_000 + b"\r\nab\r\n0\r\n\r\n",
    ]
    chunks += [
        b"2\nab\n0\n\n",
        b"2\r\nab",
        b"0\r\nTrailer: \x00\r\n\r\n",
        b"%x\r\n" % len(_BODY) + _BODY + b"\r\n",
        b"".join(b"1\r\n%c\r\n" % c for c in _BODY) + b"0\r\n\r\n",
    ]
    coding = draw.choice(
        [b"chunked", b"chunked", b"xchunked", b"gzip, chunked", b"chunked, chunked", b"Chunked\x0b", b"identity"]
    )
    return [_HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + draw.choice(chunks)]


def _smuggling(draw: random.Random) -> Pieces:
    both = [
        b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 60\r\n\r\n0\r\n\r\n",
    ]
    both += [
        b"Content-Length: 0\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"Content-Length: 3\r\nContent-Length: 0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\nContent-Length: 4\r\n\r\n1\r\nZ",
    ]
    return [_HEAD + draw.choice(both) + _SMUGGLED]


def _pipelined(draw: random.Random) -> Pieces:
    one = post("/generate", _BODY).replace(b"Connection: close\r\n", b"")
    return [one * draw.randrange(2, 30) + draw.choice([b"", _SMUGGLED, b"garbage\r\n\r\n", one[: len(one) // 2]])]


def _slow_bytes(draw: random.Random) -> Pieces:
    whole = post("/generate", _BODY)
    start = draw.choice([0, len(whole) - 40])
    slow: Pieces = [whole[:start]]
    for i in range(start, min(len(whole), start + 40)):
        slow += [whole[i : i + 1], 0.05]
    return slow


def _half(draw: random.Random) -> Pieces:
    whole = post("/generate", _BODY * 100)
    return [whole[: draw.randrange(1, len(whole))], draw.choice([0.0, 0.2, 1.0])]


def _binary_body(draw: random.Random) -> Pieces:
    return [
        post(draw.choice(["/generate", "/v1/chat/completions", "/tokenize"]), draw.randbytes(draw.choice([1, 1000, 1_000_000])))
    ]


_CASES: dict[str, Callable[[random.Random], Pieces]] = {
    "request line": _request_line,
    "noise": _noise,
    "header": _bad_header,
    "huge headers": _huge_headers,
    "length": _bad_length,
    "other length": _other_length,
    "chunks": _bad_chunks,
    "smuggling": _smuggling,
    "pipelined": _pipelined,
    "slow bytes": _slow_bytes,
    "half a request": _half,
    "binary body": _binary_body,
}


async def _send(arena: Arena, draw: random.Random, name: str) -> None:
    kind = f"http: {name}"
    pieces = _CASES[name](draw)
    data = b""
    try:
        async with connected(arena.port) as (reader, writer):
            with contextlib.suppress(ConnectionError):  # the server may have heard enough before we have said all
                for piece in pieces:
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                    else:
                        await asyncio.sleep(piece)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_PATIENCE_S):
                    while part := await reader.read(2**16):
                        data += part
            if draw.random() < 0.3:
                reset(writer)
    except OSError as error:
        arena.failed(kind, f"no connection: {type(error).__name__}")
        return
    sent = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    reply = parse_reply(data)
    if reply.status is None or arena.away:
        arena.tally.note(kind, "away" if arena.away else "closed or left")
        return
    arena.tally.note_status(kind, reply.status, reply.body, sent)
    if b"GET /smuggled" in sent and name == "smuggling" and data.count(b"HTTP/1.1 200") > 1:
        arena.tally.fail(kind, "two requests were seen in one", f"{data[:300]!r} to {sent[:300]!r}")


def _action(name: str) -> Action:
    async def run(arena: Arena, draw: random.Random) -> None:
        await _send(arena, draw, name)

    return Action(f"http: {name}", 0.5, run)


ACTIONS = [_action(name) for name in _CASES]
