"""StallWatch: ends a connection whose reader takes nothing for a while though something waits for it. It knows bytes only."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import socket
import sys
import termios

logger = logging.getLogger(__name__)


class StallWatch:
    """To be started when data waits that nothing is added to, and stopped when some is added again or all was taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, timeout_s: float) -> None:
        self._loop = loop
        self._transport = transport
        self._timeout_s = timeout_s
        self._next_check: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._next_check is None and self._timeout_s < math.inf and self._transport.get_write_buffer_size():
            self._watch()

    def stop(self) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
            self._next_check = None

    def _watch(self) -> None:
        self._next_check = self._loop.call_later(self._timeout_s, self._check, self._untaken_bytes())

    def _check(self, untaken_before: int) -> None:
        self._next_check = None
        if not self._transport.get_write_buffer_size():
            return
        if self._untaken_bytes() < untaken_before:
            self._watch()
            return
        logger.warning(
            "A client took nothing of its reply for %g s (--stream-stall-timeout-s): closing its connection.", self._timeout_s
        )
        self._transport.abort()

    def _untaken_bytes(self) -> int:
        """What has been written and the client's machine has not acknowledged."""
        return self._transport.get_write_buffer_size() + _unacknowledged_bytes(self._transport.get_extra_info("socket"))


def _unacknowledged_bytes(connection: socket.socket) -> int:
    """In the kernel's send queue, which may hold megabytes; 0 where the system does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
