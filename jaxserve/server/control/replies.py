"""Control requests that wait for the scheduler's reply: one future per request id."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from jaxserve.messages import FlushCacheReqOutput, GetInternalStateReqOutput, Message
from jaxserve.server.requests import RequestError

ControlReply = FlushCacheReqOutput | GetInternalStateReqOutput


class ControlReplies:
    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[Message], None], make: Callable[[str], Message], timeout_s: float) -> Any:
        """Sends `make(request_id)` and waits for its reply. Raises RequestError 503 when none comes in time."""
        request_id = uuid.uuid4().hex
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = reply
        message = make(request_id)
        try:
            send(message)
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError:
            raise RequestError(
                f"The scheduler did not answer {type(message).__name__} within {timeout_s:g} s.",
                status_code=503,
                err_type="ServiceUnavailableError",
            ) from None
        finally:
            del self._waiting[request_id]

    def receive(self, reply: ControlReply) -> None:
        future = self._waiting.get(reply.request_id)
        if future is not None and not future.done():  # else whoever asked has given up
            future.set_result(reply)

    def fail_all(self, message: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestError(message, status_code=503, err_type="ServiceUnavailableError"))
