"""A Hugging Face Hub on the loopback with a few repositories, as much of it as fetching a snapshot asks for."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"

Files = dict[str, bytes]


class _Handler(http.server.BaseHTTPRequestHandler):
    repositories: dict[str, Files]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("api/models/").split("/")
        name, verb, rest = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "", parts[3:]
        files = self.repositories.get(name)
        if name == "org/gated":
            self._refuse(403, "GatedRepo")
        elif files is None:
            self._refuse(404, "RepoNotFound")
        elif verb in ("revision", "tree", "resolve") and rest[0] not in ("main", SHA):
            self._refuse(404, "RevisionNotFound")
        elif verb == "tree":
            self._reply_json([{"type": "file", "path": p, "size": len(d), "oid": _digest(d)} for p, d in files.items()])
        elif verb == "resolve":
            self._reply(files["/".join(rest[1:])], "application/octet-stream")
        else:
            self._reply_json({"id": name, "sha": SHA, "siblings": [{"rfilename": path} for path in files]})

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _reply_json(self, body: Any) -> None:
        self._reply(json.dumps(body).encode(), "application/json")

    def _reply(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_digest(body)}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def fake_hub(repositories: dict[str, Files]) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and a list of what it was asked."""
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
