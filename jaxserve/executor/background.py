"""BackgroundCompiler: obtains programs behind a server that serves already, and hands them over one by one.

Where the server computes on CPU, a process of low priority compiles and the thread here only loads what it has put into the
cache: tracing would hold Python's lock, and XLA compiles in the threads that steps compute in. On accelerators the thread
compiles itself, as another process could not have the devices.

Servers and replicas with one cache share the work, as at a start: each program is compiled by one of them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.executor.compilation import ProgramCompiler
from jaxserve.executor.compile_counter import in_context
from jaxserve.executor.programs import ProgramKey, program_name

logger = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What a process needs to know to compile for a server (`jaxserve.executor.compile_process`)."""

    args: ServerArgs  # as the server was given them
    num_pages: tuple[int, ...]  # of the server's pools
    names: list[str] = []  # of the programs, in the order of their worth


class BackgroundCompiler:
    def __init__(self, compiler: ProgramCompiler, keys: Sequence[ProgramKey], order: Order | None) -> None:
        """`keys` in the order of their worth. `order`: what a process needs to know to compile them; None: compile here."""
        self._compiler = compiler
        self._missing = dict.fromkeys(keys)
        self._order = order
        self._done: queue.SimpleQueue[tuple[ProgramKey, Any]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=in_context(self._run), name="background-compiler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits for the program that the thread compiles just now. What is missing by then stays so."""
        self._stopped.set()
        if self._process is not None:
            self._process.kill()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> tuple[ProgramKey, Any] | None:
        """A program that is there and has not been taken. Never waits."""
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return None

    # --- in the thread

    def _run(self) -> None:
        started_s = time.monotonic()
        try:
            self._work()
        except Exception:
            logger.exception("%d programs are missing and stay so: steps run in larger ones.", len(self._missing))
        else:
            if not self._missing:
                logger.info("The last program was compiled or loaded after %.1f s.", time.monotonic() - started_s)

    def _work(self) -> None:
        for key in tuple(self._missing):
            if self._stopped.is_set():
                return
            self._hand_over(key, self._compiler.load(key))
        if self._missing and self._order is not None:
            for key in self._compiled_by_process(self._order):
                program = self._compiler.load(key)
                if program is None:
                    logger.warning("What was compiled in the background is not in the cache; compiling it here.")
                    break
                self._hand_over(key, program)
        for key, program in self._compiler.work(tuple(self._missing), self._stopped).results():
            self._hand_over(key, program)
        self._compiler.cache.prune()

    def _hand_over(self, key: ProgramKey, program: Any | None) -> None:
        if program is not None:
            del self._missing[key]
            self._done.put((key, program))

    def _compiled_by_process(self, order: Order) -> Iterator[ProgramKey]:
        """As they get into the cache. What a process that fails leaves missing is compiled here."""
        by_name = {program_name(key): key for key in self._missing}
        command = [sys.executable, "-m", "jaxserve.executor.compile_process"]
        process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._stopped.is_set():  # it was too early to kill it
            process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # it may have ended before it could be told anything
            assert process.stdin is not None and process.stdout is not None
            # Its standard input stays open: when it ends, this process is gone, and the other one goes too.
            process.stdin.write(msgspec.json.encode(msgspec.structs.replace(order, names=list(by_name))) + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                key = by_name.get(line.decode().strip())
                if key is not None:
                    yield key
        if process.returncode and not self._stopped.is_set():
            logger.warning("The process that compiles in the background ended with exit status %d.", process.returncode)
