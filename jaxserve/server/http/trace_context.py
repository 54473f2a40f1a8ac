"""Trace context in and out: a client's `traceparent` names the parent of what its request does; the reply names the span."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.tracing import Tracer
from jaxserve.server.tracing.context import TRACEPARENT, TRACESTATE

_NAMES = (TRACEPARENT.encode(), TRACESTATE.encode())


class TraceMiddleware:
    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = None
        if scope["type"] == "http":
            headers: dict[str, str] = {}
            for name, value in scope["headers"]:
                if name in _NAMES:  # a tracestate may come in parts
                    own, more = name.decode(), value.decode("latin-1")
                    headers[own] = f"{headers[own]},{more}" if own in headers else more
            http = self._tracer.begin_http(scope["method"], scope["path"], headers)
        if http is None:
            return await self._app(scope, receive, send)

        async def send_with_context(message: Message) -> None:
            if message["type"] == "http.response.start":
                http.status_code = message["status"]
                if http.is_used:
                    message["headers"] = [*message["headers"], *_headers(http.own.traceparent, http.own.tracestate)]
            await send(message)

        try:
            return await self._app(scope, receive, send_with_context)
        finally:
            self._tracer.end_http(http)


def _headers(traceparent: str, tracestate: str) -> list[tuple[bytes, bytes]]:
    state = [(TRACESTATE.encode(), tracestate.encode())] if tracestate else []
    return [(TRACEPARENT.encode(), traceparent.encode()), *state]
