"""A server that costs next to nothing: `python -m jaxserve.bench.serving.stub API EVENTS STEP_S` prints its port.

Every request gets the same stream, an event each step, from bytes that are there already. `ceiling` measures our
clients with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import uvloop

from jaxserve.bench.serving.options import CHAT, NATIVE

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def event_of(api: str, num_tokens: int) -> dict[str, Any]:
    if api == NATIVE:
        meta = {"id": "0" * 32, "prompt_tokens": 16, "completion_tokens": num_tokens, "cached_tokens": 0, "finish_reason": None}
        return {"text": "word " * num_tokens, "meta_info": meta}
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    choice |= {"delta": {"content": "word "}} if api == CHAT else {"text": "word "}
    return {"id": "0" * 32, "object": "chunk", "created": 0, "model": "stub", "choices": [choice], "usage": None}


def chunk(data: str) -> bytes:
    body = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


class _Stream(asyncio.Protocol):
    def __init__(self, chunks: list[bytes], step_s: float) -> None:
        self._chunks, self._step_s = chunks, step_s
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._answers = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._answers:
            self._answers = True
            self._transport.write(_HEAD)
            self._due_s = self._loop.time()
            self._step()

    def _step(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._chunks[self._next])
        self._next += 1
        if self._next == len(self._chunks):
            self._transport.write(b"0\r\n\r\n")
            self._transport.close()
            return
        self._due_s += self._step_s
        self._loop.call_at(self._due_s, self._step)


async def serve(api: str, num_events: int, step_s: float) -> None:
    events = (json.dumps(event_of(api, i + 1), separators=(",", ":")) for i in range(num_events))
    chunks = [*(chunk(event) for event in events), chunk("[DONE]")]
    server = await asyncio.get_running_loop().create_server(lambda: _Stream(chunks, step_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it closes that


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
