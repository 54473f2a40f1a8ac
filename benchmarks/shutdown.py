"""How long a server of the demo model takes from SIGTERM to its end: `python -m benchmarks.shutdown`.

Idle; while it starts; with streams that end in time; with streams that do not, so that the drain runs out and aborts them, one
of them with a reader that has stopped reading. Kubernetes waits 30 s for all of it by default.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from jaxserve.bench.live_server import free_port
from jaxserve.demo import demo_model_path


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextlib.contextmanager
def server(ready: bool = True) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    command = [sys.executable, "-m", "jaxserve", "serve", "--model-path", demo_model_path(), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while status(port, "/ready") != (200 if ready else 503):
            time.sleep(0.02)
        yield process, port
    finally:
        process.kill()
        process.wait()


def seconds_to_end(process: subprocess.Popen[bytes]) -> str:
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    return f"{time.monotonic() - started_s:.2f} s, exit code {code}"


def start_stream(port: int, num_tokens: int, *, reads: bool = True) -> threading.Thread:
    """A stream that has begun. One that does not read leaves its socket open and full."""
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"text": "a", "stream": True, "sampling_params": sampling}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    connection.recv(1)

    def read() -> None:
        with connection:
            while connection.recv(1 << 16):
                pass

    reader = threading.Thread(target=read if reads else lambda: (time.sleep(60), connection.close()), daemon=True)
    reader.start()
    return reader


def slow_down(port: int, seconds: float) -> None:
    """Steps far apart, so that a stream outlives the drain."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/slow_down",
        json.dumps({"forward_sleep_time": seconds}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()


def main() -> None:
    with server(ready=False) as (process, _):
        print(f"while starting: {seconds_to_end(process)}", flush=True)
    with server() as (process, _):
        print(f"idle: {seconds_to_end(process)}", flush=True)
    with server() as (process, port):
        for _ in range(8):
            start_stream(port, 400)
        print(f"8 streams that end in time: {seconds_to_end(process)}", flush=True)
    with server() as (process, port):
        slow_down(port, 0.5)
        for i in range(8):
            start_stream(port, 1500, reads=i > 0)
        print(f"8 streams that do not, one unread: {seconds_to_end(process)}", flush=True)


if __name__ == "__main__":
    main()
