"""Trial compilation in a process of its own.

A grammar of a few hundred bytes can keep llguidance busy for minutes, take gigabytes, or overflow its stack, which ends the
process. So each new grammar is compiled here first: the child's alarm clock kills it when the time is over, its memory and
stack are limited, and its death is one request's 400. What passes is compiled again where it is needed, which then is safe.

This module is both ends: `TrialProcess` for the parent, and what runs as `python -m jaxserve.grammar.trial`.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import subprocess
import sys
import threading
from typing import IO, Any

import msgspec

from jaxserve.grammar.errors import GrammarError, NotCompiledError
from jaxserve.grammar.prototype import compile_prototype
from jaxserve.grammar.setup import Setup
from jaxserve.grammar.tokenizer import build_tokenizer
from jaxserve.types import Grammar

# Whoever compiles what passed a trial needs a larger stack than the trial had.
TRIAL_STACK_BYTES = 32 << 20
COMPILE_STACK_BYTES = 128 << 20
_MEMORY_BYTES = 256 << 20  # on top of what the child has once it is ready
_LENGTH = struct.Struct(">I")
_ENDED_EARLY = "the grammar is nested too deeply or takes too much memory to compile"


class TrialProcess:
    """The parent's end. Starts its child when it is first needed, and again whenever that died. `check` blocks."""

    def __init__(self, setup: Setup, timeout_s: float, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and closing
        self._is_closed = False

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError with the sentence for the user if the grammar cannot be used."""
        child = self._running_child()
        assert child.stdin is not None and child.stdout is not None
        try:
            _write(child.stdin, grammar)
            reply = _read(child.stdout)
        except OSError:
            reply = None
        if reply is None:
            raise self._obituary(grammar, child.wait())
        problem = msgspec.msgpack.decode(reply, type=str)
        if problem:
            raise GrammarError(problem)

    def close(self) -> None:
        """From any thread; a `check` that is waiting fails."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()
                self._child.wait()

    def _running_child(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise NotCompiledError("The server is shutting down.")
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            return self._child

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__, str(self._timeout_s), str(self._memory_bytes)]
        # What Rust writes to stderr before it gives up is no business of the server's log; nor is Ctrl-C the child's.
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # its death shows at the first check
            _write(child.stdin, self._setup)
        return child

    def _obituary(self, grammar: Grammar, status: int) -> GrammarError:
        if status == -signal.SIGALRM:
            return NotCompiledError(f"{grammar.kind}: the grammar takes longer than {self._timeout_s:g} s to compile.")
        if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            return GrammarError(f"{grammar.kind}: {_ENDED_EARLY}.")
        return NotCompiledError(f"{grammar.kind}: compiling the grammar was interrupted (status {status}).")


def _write(pipe: IO[bytes], message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next message, or None at the end."""
    head = _read_exactly(pipe, _LENGTH.size)
    return None if head is None else _read_exactly(pipe, _LENGTH.unpack(head)[0])


def _read_exactly(pipe: IO[bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = pipe.read(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


# --- the child's end


def _serve(timeout_s: float, memory_bytes: int, requests: IO[bytes], replies: IO[bytes]) -> None:
    first = _read(requests)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    tokenizer = build_tokenizer(setup)
    _limit_memory(memory_bytes)
    while (request := _read(requests)) is not None:
        grammar = msgspec.msgpack.decode(request, type=Grammar)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            compile_prototype(tokenizer, grammar, setup.json_style)
            problem = ""
        except GrammarError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{grammar.kind}: the grammar cannot be compiled: {error}."
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, problem)


def _limit_memory(more_bytes: int) -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            data_pages = int(file.read().split()[5])
        most = data_pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = open(0, "rb", buffering=0), open(1, "wb", buffering=0)  # noqa: SIM115
    threading.stack_size(TRIAL_STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(float(sys.argv[1]), int(sys.argv[2]), requests, replies))
    worker.start()
    worker.join()


if __name__ == "__main__":
    _main()
