"""Ctrl-C in a terminal while a command loads or compiles: it ends soon, in one line, and so do its processes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

LIMIT_S = 60.0
CTRL_C = b"\x03"


class Terminal:
    """A command in a terminal of its own, and what it has shown so far."""

    def __init__(self, arguments: list[str]) -> None:
        ours, theirs = pty.openpty()
        self._terminal = ours
        self.shown = ""
        # A session of its own whose terminal this is, so that Ctrl-C reaches it; who runs the tests may ignore it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import os, fcntl, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
             "signal.signal(signal.SIGINT, signal.SIG_DFL);"
             "os.execv(sys.executable, [sys.executable, '-m', 'jaxserve', *sys.argv[1:]])", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)

    def read_until(self, words: str | None) -> None:
        """Or, without words, until it ends."""
        deadline_s = time.monotonic() + LIMIT_S
        while words is None or words not in self.shown:
            assert time.monotonic() < deadline_s, self.shown
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # nobody has it open any more
                break
            self.shown += data.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.mark.parametrize(("command", "moment"), [("chat", "Loading demo"), ("generate", "Compiling:")])
def test_ctrl_c_while_a_model_loads_and_compiles(command: str, moment: str, tmp_path: Path) -> None:
    prompt = ["hello"] if command == "generate" else []
    terminal = Terminal([command, *prompt, "--model-path", "demo", "--compilation-cache-dir", str(tmp_path)])
    try:
        terminal.read_until(moment)
        processes = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.type(CTRL_C)
        started_s = time.monotonic()
        terminal.read_until(None)
        assert terminal.process.wait(LIMIT_S) == 130, terminal.shown
        took_s = time.monotonic() - started_s
    finally:
        terminal.close()
    assert terminal.shown.rstrip().endswith("jaxserve: interrupted"), terminal.shown
    assert "Traceback" not in terminal.shown
    assert took_s < 30.0, "a thread that imports Transformers ends first, which takes its time on a busy machine"
    _, left = psutil.wait_procs(processes, timeout=10.0)
    assert not left, left
