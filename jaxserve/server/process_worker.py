"""A worker that is a process: how it is started, what it writes, and how it ends.

What it writes goes on to this process's stderr, and its last lines are kept: they are the reason given when it ends without
last words.
"""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import dataclasses
import os
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxserve.ipc import Channels
from jaxserve.messages import WorkerAddress, WorkerFailed
from jaxserve.progress import CLEAR_LINE, for_workers
from jaxserve.server.logs import escaped_output
from jaxserve.server.worker import WorkerDiedError, obituary
from jaxserve.server.worker_process import SHOW_STACKS

_TAIL_LINES = 20


@dataclasses.dataclass(frozen=True)
class WorkerCommand:
    """How to start one worker: `argv` is followed by the ipc folder, this process's id, the worker's rank and its start."""

    kind: str
    argv: tuple[str, ...]
    rank: int = 0
    start: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # beside ours

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.kind, self.rank, self.start)

    def again(self) -> WorkerCommand:
        return dataclasses.replace(self, start=self.start + 1)

    def launch(self, channels: Channels) -> ProcessWorker:
        return ProcessWorker(self, channels.folder)

    @staticmethod
    def of_module(kind: str, module: str, rank: int = 0) -> WorkerCommand:
        # -P: a file in the current folder must not shadow a module of ours.
        return WorkerCommand(kind, (sys.executable, "-P", "-m", module), rank)


class ProcessWorker:
    """One running worker and the two threads that serve it: one copies its output, one waits for its end."""

    def __init__(self, command: WorkerCommand, folder: Path) -> None:
        self.address = command.address
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.last_words: WorkerFailed | None = None
        # The signal would end it until it has learned what to do: it inherits the mask, and lifts it then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {SHOW_STACKS})
        try:
            # A session of its own: Ctrl-C in the terminal is for the main process, which then tells the workers.
            self.process = subprocess.Popen(
                [*command.argv, str(folder), str(os.getpid()), str(command.rank), str(command.start)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**_environment(), **command.env},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self.process.pid
        self._copier = threading.Thread(target=self._copy_output, name=f"{self.address}-output", daemon=True)
        self._copier.start()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()

    def show_stacks(self) -> None:
        self.process.send_signal(SHOW_STACKS)

    def notify_exit(self, loop: asyncio.AbstractEventLoop, exited: Callable[[], None]) -> None:
        """Calls `exited` on `loop` when the process has ended and its output is complete."""

        def wait() -> None:
            self.process.wait()
            self._copier.join(timeout=1.0)  # a grandchild could hold the pipe open
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is interested any more
                loop.call_soon_threadsafe(exited)

        threading.Thread(target=wait, name=f"{self.address}-exit", daemon=True).start()

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            rest = ""
            while data := os.read(pipe.fileno(), 1 << 16):
                # As it comes, not by lines: progress bars redraw theirs.
                text = escaped_output(decoder.decode(data))
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone; the worker must not block on that
                    sys.stderr.write(text)
                    sys.stderr.flush()
                *lines, rest = (rest + text).split("\n")
                self.tail.extend(map(_last_state, lines))
            if rest:
                self.tail.append(_last_state(rest))

    def obituary(self) -> WorkerDiedError:
        tail = "\n".join(line for line in self.tail if line.strip())
        said = f" Its last output:\n{tail}" if tail else ""
        return obituary(self.address, "process", self.last_words, f"{exit_text(self.process.returncode)}.{said}", self.status)


def _last_state(line: str) -> str:
    """What a terminal would show of a line that was written over."""
    return line.rsplit("\r", 1)[-1].removeprefix(CLEAR_LINE.lstrip("\r"))


def exit_text(code: int | None) -> str:
    if code is None:
        return "is still running"
    if code >= 0:
        return f"ended with exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _environment() -> dict[str, str]:
    """Ours, so that a worker finds the same jaxserve however this process found it."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **for_workers()}
    if root not in site.getsitepackages():
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return environment
