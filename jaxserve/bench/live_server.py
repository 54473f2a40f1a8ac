"""A server of its own for a benchmark: started on a free loopback port, ended with the benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Server:
    port: int
    ready_s: float  # from starting the command to /ready answering 200

    def post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path} answered {reply.status}: {data.decode()}")
        return json.loads(data)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def state(self) -> dict[str, Any]:
        connection = self.connect()
        connection.request("GET", "/server_info")
        return json.loads(connection.getresponse().read())["internal_states"][0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def serve(*options: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A ready jaxserve on a free loopback port, with all programs compiled unless the options say otherwise; its log goes to
    standard error if it fails."""
    command = [sys.executable, "-m", "jaxserve", "serve", "--log-level", "warning", "--warmup", "full", *options]
    with serve_command(command, ready_path="/ready", env=env) as server:
        yield server


@contextlib.contextmanager
def serve_command(command: Sequence[str], *, ready_path: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server of any make, once `ready_path` answers 200. It is given --port, and a process group to end."""
    port = free_port()
    started_s = time.perf_counter()
    process = subprocess.Popen([*command, "--port", str(port)], env=os.environ | (env or {}), start_new_session=True)
    try:
        while not _is_ready(port, ready_path):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
            time.sleep(0.02)
        yield Server(port, time.perf_counter() - started_s)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):  # other makes may leave workers behind
            os.killpg(process.pid, signal.SIGKILL)
