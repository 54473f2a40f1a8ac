"""The header that names a replica: kept for whatever the request generates, in the words of any protocol."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.routed_rank import HEADER, rank_header


class RoutedRankMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            rank_header.set(Headers(scope=scope).get(HEADER))
        await self._app(scope, receive, send)
