"""A server whose replies a test writes: real HTTP, each piece at its time. Beside that, a small SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from jaxserve.demo import demo_model_path


@dataclasses.dataclass(frozen=True)
class Reply:
    """A stream of (seconds after the one before, piece); or, with a status, that and its JSON. `cut`: no end comes."""

    pieces: tuple[tuple[float, bytes], ...] = ()
    status: int = 200
    body: Any = None
    cut: bool = False


def sse(value: Any) -> bytes:
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


def native(total: int, text: str = "", finish: Any = None, **meta: Any) -> bytes:
    return sse({"text": text or "x" * total, "meta_info": {"completion_tokens": total, "finish_reason": finish, **meta}})


def completion(text: str, finish: str | None = None, **more: Any) -> bytes:
    return sse({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def chat(finish: str | None = None, usage: Any = None, **delta: Any) -> bytes:
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage})


DONE = sse("[DONE]")
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


class ScriptedServer:
    """`script(path, body)` is the reply to a request; `bodies` are those that came."""

    def __init__(self, script: Callable[[str, dict[str, Any]], Reply]) -> None:
        self.script = script
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.posts: list[str] = []  # to other paths
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((request.path, body))
        self.headers.append(dict(request.headers))
        reply = self.script(request.path, body)
        if reply.status != 200 or reply.body is not None:
            return web.json_response(reply.body, status=reply.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for wait_s, piece in reply.pieces:
            await asyncio.sleep(wait_s)
            await response.write(piece)
        if reply.cut:
            assert request.transport is not None
            request.transport.close()
        return response

    async def other(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            self.posts.append(request.path)
            return web.json_response({})
        known: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "scripted"}]},
            "/model_info": {"model_path": demo_model_path()},
            "/server_info": {"internal_states": [{"avg_spec_accept_length": 2.5}]},
            "/v1/loads": {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}]},
        }
        value = known.get(request.path)
        return web.json_response(value, status=200 if value else 404)


@contextlib.contextmanager
def serving(script: Callable[[str, dict[str, Any]], Reply] | Reply) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script if callable(script) else lambda path, body: script)
    loop, ready = asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        app = web.Application()
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, server.handle)
        app.router.add_route("*", "/{path:.*}", server.other)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
