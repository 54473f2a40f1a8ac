"""The life of the connection: work that stops when the client leaves.

It is watched here, since neither ASGI servers nor FastAPI cancel a handler when its client goes away, and a request without a
reader would otherwise generate to its end. Leaving means: the work is cancelled, which leaves the stream it reads from, which
aborts the request in the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")
logger = logging.getLogger(__name__)

DONE_EVENT = b"data: [DONE]\n\n"


def event(json_bytes: bytes) -> bytes:
    return b"data: " + json_bytes + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. Call it only after the request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises ClientDisconnect, with the work cancelled and ended, if the client leaves first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            await _cancel(task)


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it has ended; whatever it raises while ending has no reader left but the log."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("A request failed while it was being cancelled.", exc_info=error)
