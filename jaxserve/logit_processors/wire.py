"""What goes between the scheduler and the process that runs users' code: msgpack, each message behind its length.

Plain data both ways: whatever the code does, what comes back is bytes.
"""

from __future__ import annotations

import socket
import struct
import time

import msgspec

_LENGTH = struct.Struct(">Q")


class Call(msgspec.Struct, array_like=True, frozen=True):
    """Of one request: its lines are its next token and those behind each of its drafts."""

    digest: bytes  # of the code
    code: bytes | None  # where the process does not have it yet
    rid: str
    params: bytes  # JSON
    prompt_ids: bytes  # int32
    output_ids: bytes  # int32: known outputs, then drafts; line k has seen all but the last num_lines - 1 - k
    num_lines: int
    logits: bytes  # float32 [num_lines, vocabulary]


class Reply(msgspec.Struct, array_like=True, frozen=True):
    logits: bytes = b""  # float32, as many as in the call
    error: str = ""  # then there are none


READY = Reply()


class LateError(Exception):
    """No answer in time."""


class GoneError(Exception):
    """The other end is closed."""


def send(connection: socket.socket, message: msgspec.Struct, deadline_s: float | None = None) -> None:
    data = msgspec.msgpack.encode(message)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        _wait_until(connection, deadline_s)
        try:
            rest = rest[connection.send(rest) :]
        except TimeoutError:
            raise LateError from None
        except OSError:
            raise GoneError from None


def receive(connection: socket.socket, most_bytes: int, deadline_s: float | None = None) -> bytes:
    """The next message, of at most so many bytes."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline_s))
    if length > most_bytes:
        raise GoneError
    return _receive_exactly(connection, length, deadline_s)


def _receive_exactly(connection: socket.socket, size: int, deadline_s: float | None) -> bytes:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        _wait_until(connection, deadline_s)
        try:
            count = connection.recv_into(rest)
        except TimeoutError:
            raise LateError from None
        except OSError:
            raise GoneError from None
        if not count:
            raise GoneError
        rest = rest[count:]
    return bytes(data)


def _wait_until(connection: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is None:
        connection.settimeout(None)
        return
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise LateError
    connection.settimeout(left_s)
