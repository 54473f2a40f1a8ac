"""Who may call what: bearer keys checked before any route runs.

Health checks, metrics, the API's description and CORS pre-flights need no key. Control endpoints take the admin key if one is
set (and then only that one), every other endpoint the API key if one is set. This is a plain ASGI middleware: it sees headers,
never a body.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http.errors import error_response
from jaxserve.server.requests import RequestError

OPEN_PREFIXES = ("/health", "/ready", "/metrics", "/docs", "/openapi.json")


class AuthMiddleware:
    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None, admin_paths: Collection[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._admin_paths = frozenset(admin_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allows(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError("The API key is missing or wrong.", 401, "AuthenticationError", code="invalid_api_key")
        await error_response(scope["path"], error)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if scope["method"] == "OPTIONS" or path.startswith(OPEN_PREFIXES):
            return True
        key = self._api_key
        if self._admin_api_key is not None and path.rstrip("/") in self._admin_paths:
            key = self._admin_api_key
        return key is None or _brings(scope, key)


def _brings(scope: Scope, key: str) -> bool:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    # Constant time, on bytes: headers are read as latin-1, whatever they hold.
    return scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode("latin-1"), key.encode())
