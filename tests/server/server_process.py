"""A server in processes of its own, around the fake scheduler, and what a test asks of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from jaxserve.demo import demo_model_path


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log_path: Path
    children: list[psutil.Process] = dataclasses.field(default_factory=list)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def status(self, path: str) -> int:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + path, timeout=10).status_code
        return 0

    def wait_for(self, path: str, status: int) -> None:
        deadline_s = time.monotonic() + 120
        while self.status(path) != status:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.05)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        return next(child for child in self.children if word in " ".join(child.cmdline()))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.exit_status() == 0, self.log

    def exit_status(self) -> int:
        code = self.process.wait(timeout=60)
        deadline_s = time.monotonic() + 10
        while left := [child for child in self.children if child.is_running()]:
            assert time.monotonic() < deadline_s, f"still in the process table: {left}"
            time.sleep(0.05)
        return code


@contextlib.contextmanager
def serving(folder: Path, fake: str = "", step_s: float = 0.0, **options: Any) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = {"model_path": demo_model_path(), "port": port, **options}
    log_path = folder / "log"
    environment = os.environ | {"FAKE_SCHEDULER": fake, "FAKE_STEP_S": str(step_s), "TMPDIR": str(folder)}
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "serve_fake.py"), json.dumps(args)],
            stderr=log, stdout=log, env=environment, text=True,
        )  # fmt: skip
    try:
        yield Server(process, f"http://127.0.0.1:{args['port']}", log_path)
        assert not list(folder.glob("jaxserve-*")), "the private folder is left"
    finally:
        process.kill()
        process.wait()
