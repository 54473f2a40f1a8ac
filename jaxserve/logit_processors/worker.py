"""The process that runs users' code: reads a call, answers with the logits or with a sentence, until the other end closes.

The code may do anything. So nothing of the server is here: no model, no requests of others but those that share the process one
after the other, and no way to reach the scheduler but the reply. Its memory is limited; its time is the parent's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from jaxserve.logit_processors.base import load_dill
from jaxserve.logit_processors.names import SGLANG_MODULE
from jaxserve.logit_processors.wire import READY, Call, GoneError, Reply, receive, send

_MEMORY_BYTES = 2 << 30  # on top of what the process has once it is ready
_MOST_ERROR_CHARS = 300
_PR_SET_PDEATHSIG = 1
_ANY_SIZE = 1 << 40

Processor = Callable[[np.ndarray, list[dict[str, Any]]], Any]


class Request:
    """What a processor sees of a request under "__req__"."""

    def __init__(self, rid: str, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        self.rid = rid
        self._prompt_ids = prompt_ids
        self._output_ids = output_ids

    @functools.cached_property
    def origin_input_ids(self) -> list[int]:
        ids: list[int] = self._prompt_ids.tolist()
        return ids

    @functools.cached_property
    def output_ids(self) -> list[int]:
        ids: list[int] = self._output_ids.tolist()
        return ids


class _BadCodeError(Exception):
    """A sentence for the user."""


def _load(code: bytes) -> Processor:
    dill = load_dill()

    class Unpickler(dill.Unpickler):  # type: ignore[name-defined]
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class("jaxserve.logit_processors.sglang_classes" if module == SGLANG_MODULE else module, name)

    try:
        processor: Processor = Unpickler(io.BytesIO(code)).load()()
    except BaseException as error:
        raise _BadCodeError(f"custom_logit_processor cannot be loaded: {_described(error)}.") from None
    if not callable(processor):
        raise _BadCodeError(
            f"custom_logit_processor must be a class whose objects can be called, not {type(processor).__name__}."
        )
    return processor


def _apply(processor: Processor, call: Call) -> bytes:
    logits = np.frombuffer(bytearray(call.logits), np.float32).reshape(call.num_lines, -1)
    prompt, outputs = np.frombuffer(call.prompt_ids, np.int32), np.frombuffer(call.output_ids, np.int32)
    params = []
    for line in range(call.num_lines):
        seen = outputs[: len(outputs) - (call.num_lines - 1 - line)]
        params.append({**json.loads(call.params), "__req__": Request(call.rid, prompt, seen)})
    expected = logits.shape
    try:
        changed = processor(logits, params)
    except BaseException as error:
        raise _BadCodeError(f"custom_logit_processor raised {_described(error)}.") from None
    if not isinstance(changed, np.ndarray):
        raise _BadCodeError(f"custom_logit_processor must return a NumPy array, got {type(changed).__name__}.")
    if changed.dtype != np.float32 or changed.shape != expected:
        raise _BadCodeError(
            f"custom_logit_processor must return float32 {list(expected)} (rows, vocabulary), got {changed.dtype} "
            f"{list(changed.shape)}."
        )
    if np.isnan(changed).any() or np.isposinf(changed).any():
        raise _BadCodeError("custom_logit_processor returned logits that are NaN or infinite.")
    return changed.tobytes()


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ""
    text = " ".join(text.split())[:_MOST_ERROR_CHARS].rstrip(".")
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _serve(connection: socket.socket) -> None:
    decode = msgspec.msgpack.Decoder(Call).decode
    processors: dict[bytes, Processor] = {}
    while True:
        call = decode(receive(connection, _ANY_SIZE))
        try:
            if call.code is not None:
                processors[call.digest] = _load(call.code)
            reply = Reply(logits=_apply(processors[call.digest], call) if call.num_lines else b"")
        except _BadCodeError as error:
            reply = Reply(error=str(error))
        except MemoryError:
            reply = Reply(error="custom_logit_processor takes too much memory.")
        send(connection, reply)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + _MEMORY_BYTES, data_bytes + _MEMORY_BYTES))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # before anything of the server


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    parent = int(sys.argv[2])
    if os.getppid() != parent:  # it died meanwhile
        return
    connection = socket.socket(fileno=int(sys.argv[1]))
    load_dill()
    _limit_memory()
    with contextlib.suppress(GoneError):
        send(connection, READY)
        _serve(connection)


if __name__ == "__main__":
    main()
