"""The limit on request bodies, enforced while they are read: no more than the limit is ever held in memory.

A declared length beyond the limit is refused before the first byte is read; a chunked body is refused at the byte that
crosses it. Plain ASGI, so streaming replies and disconnects pass through untouched.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.http.errors import error_response
from jaxserve.server.requests import RequestError


class BodyLimitMiddleware:
    def __init__(self, app: ASGIApp, max_body_size_mb: int) -> None:
        self._app = app
        self._limit_mb = max_body_size_mb
        self._limit_bytes = max_body_size_mb << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit_bytes:
            await error_response(scope["path"], self._too_large(f"{int(declared)} bytes"))(scope, receive, send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit_bytes:
                    # Passes through the route that is reading and becomes the reply in the error handlers.
                    raise self._too_large(f"more than {self._limit_bytes} bytes")
            return message

        await self._app(scope, counted_receive, send)

    def _too_large(self, got: str) -> RequestError:
        message = f"The request body may hold at most {self._limit_mb} MiB (--max-body-size-mb), got {got}."
        return RequestError(message, 413, "RequestTooLargeError", code="request_too_large")
