"""A real `jaxserve serve` in its own processes, and what a test asks of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import psutil
import pytest

STARTUP_TIMEOUT_S = 300.0
_NO_TLS: dict[str, Any] = {"verify": False}  # else each call reads the certificates of the world, for 40 ms


def free_ports(count: int) -> int:
    """The first of so many that follow each other, from where the system gives none away."""
    while True:
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            first = random.randrange(10000, 30000)
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class LiveServer:
    """One running server. `log` is what it wrote to its terminal."""

    process: subprocess.Popen[bytes]
    url: str
    log: pathlib.Path
    followers: dict[int, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)  # hosts 1 to n - 1

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **_NO_TLS, **kwargs)

    def post(self, path: str, body: Any, timeout_s: float = 120, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout_s, **_NO_TLS, **kwargs)

    def generate(self, **body: Any) -> Any:
        reply = self.post("/generate", body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> Iterator[dict[str, Any]]:
        """The JSON events of a streamed reply; fails if [DONE] is missing."""
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=timeout_s, **_NO_TLS) as reply:
            assert reply.status_code == 200, reply.read()
            done = False
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                assert not done, "an event after [DONE]"
                if line == "data: [DONE]":
                    done = True
                else:
                    yield json.loads(line[6:])
            assert done, "the stream ended without [DONE]"

    def internal_state(self) -> dict[str, Any]:
        return self.get("/server_info").json()["internal_states"][0]

    def wait_idle(self, timeout_s: float = 30) -> dict[str, Any]:
        """The internal state of the first replica once nothing runs or waits in any."""
        return self._idle_states(timeout_s)[0]

    def _idle_states(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.get("/server_info").json()["internal_states"]
            if all(state["num_running_reqs"] == 0 and state["num_waiting_reqs"] == 0 for state in states):
                return states
            assert time.monotonic() < deadline, f"still busy: {states}"
            time.sleep(0.05)

    def assert_whole(self) -> None:
        """Idle, no page or row missing, nothing compiled since it was ready."""
        for state in self._idle_states(30):
            assert state["num_used_tokens"] == 0, state
            assert state["num_leaks_repaired"] == 0, state
            assert state["runner"]["compiles_after_ready_total"] == 0, state

    def main_process(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def workers(self) -> dict[str, psutil.Process]:
        """The scheduler and detokenizer processes."""
        found = {}
        for child in self.main_process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                for name in ("scheduler", "detokenizer"):
                    if f"jaxserve.server.{name}" in command:
                        found[name] = child
        return found

    def schedulers(self) -> list[psutil.Process]:
        """In the order they were started: of replicas that never died, by rank."""
        children = self.main_process().children()
        return [child for child in children if "jaxserve.server.scheduler" in " ".join(child.cmdline())]

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout_s)


def environment() -> dict[str, str]:
    """A user's: without the eight pretended devices of the unit tests, and with all of XLA's optimizations."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


@dataclasses.dataclass(frozen=True)
class Deployment:
    """How a server is spread, whatever it serves."""

    num_hosts: int = 1
    num_fronts: int = 1
    num_stages: int = 1  # of a pipeline
    num_shards: int = 1  # groups of devices with attention of their own; of a device each

    @property
    def options(self) -> tuple[str, ...]:
        devices, fronts = str(self.num_hosts * self.num_shards), str(self.num_fronts)
        detokenizers = ("--detokenizer-worker-num", "2") if self.num_fronts > 1 else ()
        shards = ("--attn-dp-size", str(self.num_shards))
        stages = ("--pp-size", str(self.num_stages))
        return ("--tp-size", devices, *stages, *shards, "--tokenizer-worker-num", fronts, *detokenizers)


# A fixture's parameters: one host and one front process, and in the full matrices two, with half of the devices each, or three;
# or four devices with attention of their own; or two stages; these over two hosts as well.
DEPLOYMENTS = [
    pytest.param(Deployment(), id="1"),
    pytest.param(Deployment(num_hosts=2), marks=pytest.mark.matrix, id="2 hosts"),
    pytest.param(Deployment(num_fronts=3), marks=pytest.mark.matrix, id="3 fronts"),
    pytest.param(Deployment(num_stages=2), marks=pytest.mark.matrix, id="2 stages"),
    pytest.param(Deployment(num_shards=4), marks=pytest.mark.matrix, id="4 shards"),
    pytest.param(Deployment(num_hosts=2, num_shards=2), marks=pytest.mark.matrix, id="2 shards on 2 hosts"),
    pytest.param(Deployment(num_hosts=2, num_stages=2), marks=pytest.mark.matrix, id="2 stages on 2 hosts"),
]


def follower_log(log: pathlib.Path, rank: int) -> pathlib.Path:
    return log.with_name(f"{log.name}-{rank}")


def launch_hosts(
    log: pathlib.Path,
    num_hosts: int,
    *options: str,
    env: dict[str, str] | None = None,
    only: Sequence[int] | None = None,
    followers_env: Mapping[str, str] | None = None,
) -> LiveServer:
    """A server of several hosts, all of them this machine; or `only` some of them, of which 0 is one. What `followers_env`
    says, all know but host 0."""
    options = ("--nnodes", str(num_hosts), "--dist-init-addr", f"127.0.0.1:{free_ports(3)}", *options)
    server = launch(log, *options, env=env)
    command = [sys.executable, "-m", "jaxserve", "serve", "--warmup", "full", *options]
    for rank in [rank for rank in range(1, num_hosts) if only is None or rank in only]:
        with follower_log(log, rank).open("wb") as terminal:
            follower = subprocess.Popen(
                [*command, "--node-rank", str(rank)],
                stdout=terminal,
                stderr=subprocess.STDOUT,
                env={**(env or os.environ), **(followers_env or {})},
            )
        server.followers[rank] = follower
    return server


def launch(log: pathlib.Path, *options: str, port: int | None = None, env: dict[str, str] | None = None) -> LiveServer:
    """Starts a server without waiting for it; in the tests' environment, or in `env`. Ready means that all is compiled."""
    port = port or free_port()
    command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port), "--warmup", "full", *options]
    with log.open("wb") as terminal:
        process = subprocess.Popen(
            command, stdout=terminal, stderr=subprocess.STDOUT, env={**(env or os.environ), "PYTHONUNBUFFERED": "1"}
        )
    return LiveServer(process, f"http://127.0.0.1:{port}", log)


def wait_ready(server: LiveServer, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        assert server.process.poll() is None, f"the server ended at start-up:\n{server.log.read_text()}"
        with contextlib.suppress(httpx.TransportError):
            if server.get("/ready").status_code == 200:
                return
        assert time.monotonic() < deadline, f"not ready after {timeout_s} s:\n{server.log.read_text()}"
        time.sleep(0.1)


@contextlib.contextmanager
def running(log: pathlib.Path, *options: str, env: dict[str, str] | None = None, num_hosts: int = 1) -> Iterator[LiveServer]:
    """A ready server, stopped and checked for a clean exit at the end."""
    with ending(launch_hosts(log, num_hosts, *options, env=env) if num_hosts > 1 else launch(log, *options, env=env)) as server:
        wait_ready(server)
        yield server
        server.assert_whole()
        assert server.stop() == 0, server.log.read_text()
        for rank, follower in server.followers.items():
            assert follower.wait(30) == 0, follower_log(log, rank).read_text()


@contextlib.contextmanager
def ending(server: LiveServer) -> Iterator[LiveServer]:
    """Nothing of it is left in the end, whatever happens."""
    try:
        yield server
    finally:
        for process in (server.process, *server.followers.values()):
            if process.poll() is None:
                process.kill()
                process.wait()
