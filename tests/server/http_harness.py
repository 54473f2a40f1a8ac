"""A fake-backed app, called in process or through a real uvicorn on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService

from jaxserve.config import ServerArgs
from jaxserve.server.elsewhere import Place
from jaxserve.server.http.app import create_app
from jaxserve.server.http.connection_limits import ConnectionLimits
from jaxserve.server.http.uvicorn_server import make_http_server

MODEL = "/models/tiny"


@contextlib.asynccontextmanager
async def app_client(service: FakeService, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, ServerArgs(**{"model_path": MODEL, **options}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@contextlib.asynccontextmanager
async def live_server(
    service: FakeService,
    limits: ConnectionLimits | None = None,
    place: Place | None = None,
    inside: Path | None = None,
    **options: Any,
) -> AsyncIterator[str]:
    """The URL of a real HTTP server on this loop. `inside`: where it listens for other processes of the server, too."""
    server = make_http_server(service, ServerArgs(**{"model_path": MODEL, **options}), limits, place)
    server.config.timeout_graceful_shutdown = 2
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as inner:
        listener.bind(("127.0.0.1", 0))
        if inside is not None:
            inner.bind(str(inside))
        listeners = [listener] if inside is None else [listener, inner]
        task = asyncio.create_task(server.serve(sockets=listeners))
        while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
            await asyncio.sleep(0.005)
        try:
            yield f"http{'s' * bool(options.get('ssl_certfile'))}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def error_message(reply: httpx.Response) -> str:
    """Of an error in any protocol's envelope."""
    error = reply.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended with [DONE]."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], parts[-2:]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (any condition of a test)
            await asyncio.sleep(0.005)


def self_signed(folder: Path) -> tuple[str, str]:
    """(certificate, key) for 127.0.0.1."""
    folder.mkdir(exist_ok=True)
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    if shutil.which("openssl") is None:
        pytest.skip("making a certificate takes the openssl command")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key
