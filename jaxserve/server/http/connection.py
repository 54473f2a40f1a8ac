"""Replies that follow the life of the connection: server-sent event streams, and work that stops when the client leaves.

Both watch the connection themselves, since neither ASGI servers nor FastAPI cancel a handler when its client goes away, and a
request without a reader would otherwise generate to its end. Leaving means: the work is cancelled, which closes the generator
it reads from, which aborts the request in the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.http.errors import as_request_error, error_body, error_response

T = TypeVar("T")
logger = logging.getLogger(__name__)

DONE_EVENT = b"data: [DONE]\n\n"
# A producer waits while this much is unsent: a client that reads slowly must not fill the server's memory.
MAX_UNSENT_BYTES = 1 << 20


def event(json_bytes: bytes) -> bytes:
    return b"data: " + json_bytes + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. Call it only after the request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises ClientDisconnect, with the work cancelled and ended, if the client leaves first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            await _cancel(task)


class EventStream(Response):
    """Sends the byte strings a generator yields as one text/event-stream; what is ready together goes out together.

    The status line waits for the first event, so a request refused before it began gets an ordinary error reply. A failure
    later becomes an error event followed by [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Response set a length for its empty body; a stream has none.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events = events
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._wake = asyncio.Event()  # there is something to send, the producer ended or the client left
        self._room = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.ensure_future(self._produce())
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        for task in (producer, watcher):
            task.add_done_callback(lambda _: self._wake.set())
        try:
            await self._send_all(producer, watcher, scope, receive, send)
        finally:
            watcher.cancel()
            if not producer.done():
                await _cancel(producer)

    async def _produce(self) -> None:
        try:
            async for data in self._events:
                self._unsent.append(data)
                self._unsent_bytes += len(data)
                self._wake.set()
                while self._unsent_bytes > MAX_UNSENT_BYTES:
                    self._room.clear()
                    await self._room.wait()
        finally:
            await self._events.aclose()

    def _take(self) -> bytes:
        data = b"".join(self._unsent)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._room.set()
        return data

    async def _send_all(
        self, producer: asyncio.Task[None], watcher: asyncio.Task[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        started = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            if watcher.done():
                return
            ended = producer.done()
            error = producer.exception() if ended else None
            data = self._take()
            if error is not None and not started and not data:
                await error_response(scope["path"], as_request_error(error))(scope, receive, send)
                return
            if error is not None:
                data += event(msgspec.json.encode(error_body(scope["path"], as_request_error(error)))) + DONE_EVENT
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": not ended})
            if ended:
                return


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended; whatever it raises while ending has no reader left but the log."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("A request failed while it was being cancelled.", exc_info=error)
