"""The server under abuse: a real `jaxserve serve` in its own processes, with its log, its memory and its state."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.abuse.connection import exchange, get
from jaxserve.bench.live_server import free_port

_START_TIMEOUT_S = 300.0
# What must not stand in a log, whatever clients send.
_TRACES = ("Traceback (most recent call last)", "was never retrieved", "was never awaited", "Exception ignored")
_ADDRESS = re.compile("0x[0-9a-f]+")


@dataclasses.dataclass
class Subject:
    folder: pathlib.Path
    options: list[str]
    port: int = dataclasses.field(default_factory=free_port)
    starts: int = 0

    def __post_init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> pathlib.Path:
        return self.folder / f"server-{self.starts}.log"

    async def start(self) -> None:
        """Starts it and waits until it is ready and compiles nothing more. RuntimeError if it ends."""
        self.starts += 1
        command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(self.port), "--warmup", "full", *self.options]
        with self.log.open("wb") as terminal:
            self.process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True)  # noqa: ASYNC220
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended at its start, see {self.log}")
            with contextlib.suppress(OSError, TimeoutError):
                if (await exchange(self.port, get("/ready"), timeout_s=5)).status == 200:
                    return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the server was not ready after {_START_TIMEOUT_S:g} s, see {self.log}")

    async def fetch(self, path: str) -> Any:
        return json.loads((await exchange(self.port, get(path), timeout_s=60)).body)

    async def state(self) -> dict[str, Any]:
        return (await self.fetch("/server_info"))["internal_states"][0]

    def processes(self) -> dict[str, psutil.Process]:
        """Of main, scheduler and detokenizer those that live."""
        found: dict[str, psutil.Process] = {}
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            found["main"] = main
            for child in main.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    command = " ".join(child.cmdline())
                    name = next((name for name in ("scheduler", "detokenizer") if f"jaxserve.server.{name}" in command), None)
                    if name is not None:
                        found[name] = child
        return found

    def resident_mb(self) -> dict[str, float]:
        sizes = {}
        for name, process in self.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes[name] = round(process.memory_info().rss / 2**20, 1)
        return sizes

    async def whole(self, timeout_s: float = 60) -> str | None:
        """What is not as it was before anybody came, or None. Asks until a moment comes in which nothing runs or waits."""
        deadline_s = time.monotonic() + timeout_s
        wrong = "never asked"
        while time.monotonic() < deadline_s:
            state = await self.state()
            expected = {
                "num_running_reqs": 0,
                "num_waiting_reqs": 0,
                "num_used_tokens": 0,
                "is_paused": False,
                "released_memory": [],
            }
            found = {name: state[name] for name in expected} | {"num_leaks_repaired": state["num_leaks_repaired"]}
            found["compiles_after_ready_total"] = state["runner"]["compiles_after_ready_total"]
            differs = {name: value for name, value in found.items() if value != expected.get(name, 0)}
            if not differs:
                return None
            wrong = str(differs)
            await asyncio.sleep(0.05)
        return f"{wrong} {timeout_s:g} s after the last request"

    def traces(self) -> Iterator[tuple[str, str]]:
        """Of each traceback in the logs of all starts: its last line, and where it stands with what follows."""
        for number in range(1, self.starts + 1):
            lines = (self.folder / f"server-{number}.log").read_text(errors="replace").splitlines()
            for i, line in enumerate(lines):
                if any(trace in line for trace in _TRACES):
                    last = next((later for later in lines[i + 1 :] if later[:1] not in (" ", "", "|")), line)
                    context = lines[max(0, i - 1) : i + 60]
                    yield (
                        _ADDRESS.sub("0x..", last)[:150],
                        f"server-{number}.log:{i + 1}: " + " | ".join(context[:2] + context[-1:]),
                    )

    async def ended(self, timeout_s: float = 60) -> int | None:
        """The exit status, or None if it goes on."""
        assert self.process is not None
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline_s:  # noqa: ASYNC110 (nobody tells us)
            await asyncio.sleep(0.1)
        return self.process.poll()

    async def stop(self) -> int | None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = await self.ended()
        if status is None:
            self.kill()
        return status

    def kill(self) -> None:
        """All that is left of the process group, whatever state it is in."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
