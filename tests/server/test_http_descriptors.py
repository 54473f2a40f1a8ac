"""A server that may open few files, and clients that take all it has."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from http_harness import self_signed
from http_process import http_process

HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextlib.contextmanager
def sockets(url: str, count: int, data: bytes = HEAD) -> Iterator[list[socket.socket]]:
    address = urlsplit(url)
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=10))
            clients.append(client)
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
        yield clients


def is_answering(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/health", timeout=5, verify=False).status_code == 200
    return False


def log_of(process: subprocess.Popen[str]) -> str:
    return process.communicate("", timeout=30)[1]


@pytest.mark.parametrize("data", [HEAD, HEAD + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"])
def test_half_sent_requests_do_not_lock_everybody_out(data: bytes) -> None:
    """400 sockets that send half a request each, and 256 files: others are served, and the log stays short."""
    with http_process(256) as (process, url), sockets(url, 400, data):
        time.sleep(1.1)  # by now they may have to make room
        before_s = sum(psutil.Process(process.pid).cpu_times()[:2])
        for _ in range(20):
            assert httpx.get(url + "/health", timeout=5).status_code == 200
        time.sleep(1)
        assert sum(psutil.Process(process.pid).cpu_times()[:2]) - before_s < 0.5, "it spins"
        log = log_of(process)
    assert "Traceback" not in log
    assert len(log.splitlines()) < 10, log


def test_a_flood_of_connections_leaves_the_server_whole(tmp_path: Path) -> None:
    """Sockets that never get as far as a connection: TLS handshakes that do not begin use up the files themselves."""
    certificate, key = self_signed(tmp_path)
    with http_process(128, ssl_certfile=certificate, ssl_keyfile=key) as (process, url):
        with sockets(url, 200):
            time.sleep(0.5)
        deadline_s = time.monotonic() + 10
        while not is_answering(url):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        log = log_of(process)
    assert "Traceback" not in log
    assert len(log.splitlines()) < 10, log


def test_the_limit_on_files_is_raised_and_bounds_connections() -> None:
    code = """if True:
        import resource
        from jaxserve.server.http.uvicorn_server import max_connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1024))
        print(max_connections(None), max_connections(10), max_connections(10**6), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    by_files, few, many, soft = map(int, done.stdout.split())
    assert soft == 1024
    assert 900 < by_files == many < 1024 - 64
    assert few == 10
