"""A fresh user's first minutes, literally: clone, `make demo`, `make serve` and the README's curl; then what tests add.

    python -m benchmarks.first_answer [--python python3.11] [--python python3.13] [--setup]

Prints a transcript for each Python: every command, its output with the seconds since it began before each line, its seconds,
and the megabytes on disk. The clone is of what is committed here; environment and cache of programs are new, pip's own cache is
as it is. `--setup` also does `make setup`, which the tests need. Needs the packages' index, and port 30000 free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_READY_URL = "http://127.0.0.1:30000/ready"
_READY_WITHIN_S = 120.0
_POLL_S = 0.2


class Newcomer:
    """Somebody with `python` in an empty folder."""

    def __init__(self, python: str, folder: Path) -> None:
        self._clone = folder / "jaxserve"
        self._cache = folder / "cache"
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(self._cache), "PYTHON": python}
        self._environment["PIP_CACHE_DIR"] = pip_cache()  # which else would be in the new cache
        self._environment["PYTHONUNBUFFERED"] = "1"  # as on a terminal: lines have their own times
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            self._environment.pop(name, None)

    def clone(self) -> None:
        self._run(f"git clone --quiet {_ROOT} {self._clone}", self._clone.parent)
        print(f"  {megabytes(self._clone)} MB")

    def make(self, target: str) -> None:
        self._run(f"make {target}", self._clone)
        print(f"  .venv: {megabytes(self._clone / '.venv')} MB, compiled programs: {megabytes(self._cache)} MB")

    def serve_and_ask(self) -> None:
        """`make serve`, and the README's curl in what would be another terminal."""
        (curl,) = re.findall(r"^curl .*?'$", (self._clone / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        started_s = time.monotonic()
        with (self._clone.parent / "log").open("wb") as log:
            server = subprocess.Popen(
                ["make", "serve"], cwd=self._clone, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until_ready(server)
            print(f"$ make serve\n  ready after {time.monotonic() - started_s:.1f} s")
            self._run(curl, self._clone)
        finally:
            os.killpg(server.pid, signal.SIGINT)
            server.wait()

    def _run(self, command: str, folder: Path) -> None:
        print(f"$ {command}", flush=True)
        started_s = time.monotonic()
        process = subprocess.Popen(
            command, shell=True, cwd=folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{time.monotonic() - started_s:7.1f}  {line}", end="", flush=True)
        if process.wait():
            raise SystemExit(f"{command} ended with exit status {process.returncode}.")
        print(f"\n  {time.monotonic() - started_s:.1f} s", flush=True)


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(_READY_URL, timeout=_POLL_S):
            return
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("make serve did not become ready.")
        time.sleep(_POLL_S)


def megabytes(path: Path) -> int:
    kilobytes = subprocess.run(["du", "-sk", path], capture_output=True, text=True, check=True).stdout.split()[0]
    return round(int(kilobytes) / 1024)


def pip_cache() -> str:
    return os.environ.get("PIP_CACHE_DIR") or str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="may be given several times; default: python3")
    parser.add_argument("--setup", action="store_true")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=True)
    cached = megabytes(Path(pip_cache())) if Path(pip_cache()).is_dir() else 0
    print(f"commit {commit.stdout.strip()}, {platform.platform()}, {os.cpu_count()} CPUs, pip's cache holds {cached} MB")
    for python in options.python or ["python3"]:
        version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        print(f"\n--- {version}", flush=True)
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="first-answer-") as folder:
            newcomer = Newcomer(python, Path(folder))
            newcomer.clone()
            newcomer.make("demo")
            print(f"  from nothing to the end of the demo: {time.monotonic() - started_s:.0f} s")
            newcomer.serve_and_ask()
            if options.setup:
                newcomer.make("setup")


if __name__ == "__main__":
    main()
