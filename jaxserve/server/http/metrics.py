"""/metrics, and what counts HTTP requests and replies.

An endpoint's label is its route, never the path that was asked for: clients think up as many of those as they like.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.http.bounded_protocol import was_passed_on
from jaxserve.server.http.service import service_of
from jaxserve.server.metrics import ServerMetrics, header_labels

_UNKNOWN = "unknown"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """What Prometheus asks for: numbers of all processes, as text or as OpenMetrics."""
    text, content_type = await service_of(request).scrape(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


class HttpMetricsMiddleware:
    def __init__(self, app: ASGIApp, counts: ServerMetrics, routes: Iterable[BaseRoute], labels_header: str) -> None:
        self._app = app
        self._requests = counts.registry.counter("http_requests_total")
        self._responses = counts.registry.counter("http_responses_total")
        self._active = counts.registry.gauge("http_requests_active")
        self._custom, self._header = counts.custom_labels, labels_header
        paths = [route for route in routes if isinstance(route, Route)]
        self._exact = {route.path for route in paths if "{" not in route.path}
        self._patterns: list[tuple[re.Pattern[str], str]] = [(r.path_regex, r.path) for r in paths if "{" in r.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._custom.names:
            header_labels.set(self._custom.of_header(Headers(scope=scope).get(self._header, "")))
        if was_passed_on(scope):  # who has passed it on counts it
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN
        labels = (self._endpoint(scope["path"]), method)
        self._requests.inc(1, labels)
        self._active.inc(1, labels)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses.inc(1, (*labels, str(message["status"])))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._active.inc(-1, labels)

    def _endpoint(self, path: str) -> str:
        path = path.rstrip("/") or "/"
        if path in self._exact:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), _UNKNOWN)
