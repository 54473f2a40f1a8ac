"""The limits on request bodies, enforced while they are read: on one, and on all that are being read at the same time.

A declared length beyond the limit is refused before the first byte is read; a chunked body is refused at the byte that
crosses it. Plain ASGI, so streaming replies and disconnects pass through untouched.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.http.connection_limits import RareWarnings
from jaxserve.server.http.errors import error_response
from jaxserve.server.requests import ERR_TYPES, RequestError

# Bodies that are being read may together hold so many times the largest one, or slow uploads fill the memory. The first bytes
# of each do not count, or those who hold that much keep everybody out; the number of connections bounds them.
LARGE_BODIES_AT_ONCE = 16
SMALL_BODY_BYTES = 1 << 20


class BodyLimitMiddleware:
    def __init__(self, app: ASGIApp, max_body_size_mb: int) -> None:
        self._app = app
        self._limit_mb = max_body_size_mb
        self._limit_bytes = max_body_size_mb << 20
        self._warnings = RareWarnings()
        self._large_bytes = 0  # of the bodies that are being read now, without the first bytes of each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit_bytes:
            await error_response(scope["path"], self._too_large(f"{int(declared)} bytes"))(scope, receive, send)
            return
        received = large = 0

        def set_large(num_bytes: int) -> None:
            nonlocal large
            self._large_bytes += num_bytes - large
            large = num_bytes

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                # A whole body is decoded and dropped before anything else is read.
                set_large(max(received - SMALL_BODY_BYTES, 0) if message.get("more_body") else 0)
                refusal = None
                if received > self._limit_bytes:
                    refusal = self._too_large(f"more than {self._limit_bytes} bytes")
                elif large and self._large_bytes > LARGE_BODIES_AT_ONCE * self._limit_bytes:
                    refusal = self._too_many()
                if refusal is not None:
                    set_large(0)  # what came is dropped; sending the refusal may take a while
                    # It passes through the route that is reading and becomes the reply in the error handlers.
                    raise refusal
            return message

        try:
            await self._app(scope, counted_receive, send)
        finally:
            set_large(0)

    def _too_many(self) -> RequestError:
        limit_mb = LARGE_BODIES_AT_ONCE * self._limit_mb
        self._warnings.warn("Refused a request: large bodies that are being read hold %d MiB, the most they may.", limit_mb)
        message = f"Large request bodies that are being read hold {limit_mb} MiB, the most they may together; try again later."
        return RequestError(message, 503, ERR_TYPES[503])

    def _too_large(self, got: str) -> RequestError:
        message = f"The request body may hold at most {self._limit_mb} MiB (--max-body-size-mb), got {got}."
        return RequestError(message, 413, "RequestTooLargeError", code="request_too_large")
