"""Bodies are JSON, and say so. A browser sends any page's text and forms to any address without asking, but not JSON: what does
not say that it is JSON is refused, however well it could be read as such.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http.body import shown
from jaxserve.server.http.errors import error_response
from jaxserve.server.requests import RequestError


class JsonBodyMiddleware:
    """400 to a body without a JSON content type, as SGLang answers below /v1/. Requests without a body need none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if not _has_body(headers) or _is_json(headers.get("content-type", "")):
            await self._app(scope, receive, send)
            return
        got = f"the content-type {shown(headers['content-type'])}" if "content-type" in headers else "no content-type"
        message = (
            f"The request body must be JSON with the content-type application/json, got {got}. "
            "With curl, add -H 'Content-Type: application/json'."
        )
        await error_response(scope["path"], RequestError(message))(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
