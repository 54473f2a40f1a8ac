"""The files under static/, read once, and the headers they go out with."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A page runs the scripts of this server and asks this server, nothing else. Trusted types: text never becomes HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Kept, but asked about each time, which costs 304 and no body: another version of the server is seen at once.
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@functools.cache
def _files() -> Mapping[str, _File]:
    """By name. Whatever else a path says is not there."""
    found = {}
    for path in _FOLDER.iterdir():
        if path.suffix in _MEDIA_TYPES:
            content = path.read_bytes()
            found[path.name] = _File(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def file_response(request: Request, name: str) -> Response | None:
    """None: there is no such file."""
    file = _files().get(name)
    if file is None:
        return None
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def front_page(request: Request) -> Response | None:
    """What `/` shows to browsers; None for other clients."""
    accepts_pages = "text/html" in request.headers.get("accept", "")
    reply = file_response(request, "index.html") if accepts_pages else None
    if reply is not None:
        reply.headers["Vary"] = "Accept"
    return reply
