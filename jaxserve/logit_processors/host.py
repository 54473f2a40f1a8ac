"""ProcessorHost: gives logits to the process that runs users' code, and takes them back in time or not at all.

One process, one call after the other. A call that takes too long, or that ends the process, is an error of whoever made it; the
next call finds a new process. That is started at once, so that nobody waits for more than its rest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import numpy as np

from jaxserve.logit_processors.wire import Call, GoneError, LateError, Reply, receive, send
from jaxserve.types import UserProcessor

_START_TIMEOUT_S = 60.0
# Different codes in one process; with more it is started anew, which frees their memory.
_MOST_CODES = 64
_REPLY_OVERHEAD_BYTES = 1 << 16

_decode = msgspec.msgpack.Decoder(Reply).decode


class ProcessorError(Exception):
    """Of one request's processor: a sentence for the user. `status_code`: whether its code is at fault or the process."""

    def __init__(self, message: str, status_code: int = 400, *, ended_process: bool = False) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.ended_process = ended_process  # the same code would do it again


class ProcessorHost:
    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: what a call may take, and before the first with some code, loading it."""
        self._timeout_s = timeout_s
        self._known: set[bytes] = set()
        self._is_ready = False
        self.num_started = 0
        self._start()

    def apply(
        self, processor: UserProcessor, rid: str, prompt_ids: np.ndarray, output_ids: np.ndarray, logits: np.ndarray
    ) -> np.ndarray:
        """What the processor makes of `logits` float32 [lines, V]: those of the request's next token and of the tokens behind
        each of its drafts, which `output_ids` ends with. Raises ProcessorError."""
        digest = _digest(processor.code)
        self._make_ready()
        if digest not in self._known:
            if len(self._known) >= _MOST_CODES:
                self._start_anew()
                self._make_ready()
            self._call(Call(digest, processor.code, rid, b"", b"", b"", 0, b""), "loading it")
            self._known.add(digest)
        call = Call(
            digest, None, rid, processor.params, _bytes(prompt_ids), _bytes(output_ids), len(logits), logits.tobytes()
        )  # fmt: skip
        reply = self._call(call, "a call")
        if len(reply.logits) != logits.nbytes:
            self._start_anew()
            raise ProcessorError("custom_logit_processor disturbed the process that runs it.", ended_process=True)
        return np.frombuffer(reply.logits, np.float32).reshape(logits.shape)

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)  # and what the code has started
        self._child.wait()

    def _call(self, call: Call, what: str) -> Reply:
        deadline_s = time.monotonic() + self._timeout_s
        try:
            send(self._connection, call, deadline_s)
            reply = _decode(receive(self._connection, len(call.logits) + _REPLY_OVERHEAD_BYTES, deadline_s))
        except LateError:
            self._start_anew()
            raise ProcessorError(
                f"custom_logit_processor took too long: {what} may take {self._timeout_s:g} s "
                "(--custom-logit-processor-timeout-s).",
                ended_process=True,
            ) from None
        except (GoneError, msgspec.DecodeError):
            self._start_anew()
            raise ProcessorError("custom_logit_processor ended the process that runs it.", ended_process=True) from None
        if reply.error:
            raise ProcessorError(reply.error)
        return reply

    def _make_ready(self) -> None:
        """Where the process died while nobody asked it anything, there is a new one."""
        if self._is_ready and self._child.poll() is None:
            return
        if self._child.poll() is not None and self._is_ready:
            self._start_anew()
        try:
            receive(self._connection, _REPLY_OVERHEAD_BYTES, time.monotonic() + _START_TIMEOUT_S)
        except (LateError, GoneError):
            self._start_anew()
            raise ProcessorError("The process that runs logit processors cannot be started.", 500) from None
        self._is_ready = True

    def _start_anew(self) -> None:
        self.close()
        self._start()

    def _start(self) -> None:
        self._known.clear()
        self._is_ready = False
        self.num_started += 1
        self._connection, child_end = socket.socketpair()
        with child_end:
            # Not a thread more than needed: each takes memory, and the cores are the model's.
            threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            command = [sys.executable, "-m", "jaxserve.logit_processors.worker", str(child_end.fileno()), str(os.getpid())]
            # What users' code prints is no business of the server's log; nor is Ctrl-C the child's.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
                env=os.environ | threads,
            )


@functools.lru_cache(_MOST_CODES)
def _digest(code: bytes) -> bytes:
    """Asked for in every step of every request."""
    return hashlib.blake2b(code, digest_size=16).digest()


def _bytes(ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(ids, np.int32).tobytes()
