"""`--fastapi-root-path`: the server under a path of a proxy that does not take it away.

The outermost layer takes it off, so that everything behind it, the check of keys first of all, sees the one path that a route
has.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path == self._root or path.startswith(f"{self._root}/"):
            raw = scope.get("raw_path", b"")
            scope = {**scope, "path": path[len(self._root) :] or "/", "raw_path": raw[len(self._root.encode()) :] or b"/"}
        await self._app(scope, receive, send)
