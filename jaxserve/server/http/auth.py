"""Who may call what: keys checked before any route runs. They come as bearer tokens, or as Anthropic's clients send them.

Health checks, metrics, the API's description, the web pages and CORS pre-flights need no key. Control endpoints take the admin
key if one is set (and then only that one), every other endpoint the API key if one is set. This is a plain ASGI middleware: it
sees headers, never a body.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http.errors import error_response
from jaxserve.server.requests import RequestError

OPEN_PREFIXES = ("/health", "/ready", "/metrics", "/docs", "/openapi.json", "/playground", "/dashboard", "/web/")


class AuthMiddleware:
    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None, admin_paths: Collection[str]) -> None:
        self._app = app
        self._keys = None if api_key is None else _spellings(api_key)
        self._admin_keys = None if admin_api_key is None else _spellings(admin_api_key)
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
        keys = self._keys
        if self._admin_keys is not None and path.rstrip("/") in self._admin_paths:
            keys = self._admin_keys
        if keys is None:
            return True
        return any(secrets.compare_digest(token, key) for token in _tokens(scope) for key in keys)


def _spellings(key: str) -> list[bytes]:
    """A key's bytes in a header: clients send what is not ASCII as UTF-8, some as latin-1."""
    utf8 = key.encode()
    try:
        return list({utf8, key.encode("latin-1")})
    except UnicodeEncodeError:
        return [utf8]


def _tokens(scope: Scope) -> list[bytes]:
    """What the request brings as keys: a bearer token, an x-api-key."""
    tokens = []
    value = _header(scope, b"authorization")
    scheme, _, token = value.partition(b" ")
    if scheme.lower() == b"bearer":
        tokens.append(token.strip(b" \t"))
    if key := _header(scope, b"x-api-key"):
        tokens.append(key.strip(b" \t"))
    return tokens


def _header(scope: Scope, name: bytes) -> bytes:
    value: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return value
