"""What connections may cost before a request is known: how many there are, how large a head is, how long reading may take.

`Admission` counts the connections of one server. Where no more fit, the one that has brought no whole request for longest makes
room; it knows neither HTTP nor what a request asks for. The limits are applied in `bounded_protocol`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Sizes are those of other servers; times are long for any working network and short for whoever only holds a socket."""

    max_connections: int
    head_bytes: int = 64 << 10  # request line and headers
    target_bytes: int = 8 << 10  # path and query
    num_headers: int = 256
    # Beside a body's own bytes: chunk sizes, chunk extensions, trailers. Small chunks may have more, see bounded_protocol.
    framing_bytes: int = 64 << 10
    num_pipelined: int = 64  # requests that wait on a connection for the one before them
    head_timeout_s: float = 20.0  # from connecting, or from a head's first byte, to its last
    # A body brings so many bytes in each such window, or its end: at least 546 bytes per second.
    body_window_s: float = 30.0
    body_window_bytes: int = 16 << 10
    stall_timeout_s: float = 60.0  # a reader that takes nothing for so long of what waits for it
    make_room_after_s: float = 1.0  # a connection that has brought no whole request for so long may have to make room

    def passed_on(self) -> ConnectionLimits:
        """For what another process of this server passes on. It has checked the head, which may have grown since; who reads
        the reply, and how fast, is its matter."""
        return dataclasses.replace(
            self,
            head_bytes=2 * self.head_bytes,
            target_bytes=2 * self.target_bytes,
            num_headers=2 * self.num_headers,
            stall_timeout_s=math.inf,
        )


class Connection(Protocol):
    def make_room(self) -> None:
        """Closes; no whole request is being answered."""


class RareWarnings:
    """Warnings that others can cause at will: one of a kind every few seconds, which says for how many it stands."""

    def __init__(self, every_s: float = _WARN_EVERY_S) -> None:
        self._every_s = every_s
        self._next_s: dict[str, float] = {}  # by the message's template
        self._num_silent: dict[str, int] = {}

    def warn(self, template: str, *values: Any) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s.get(template, 0.0):
            self._num_silent[template] = self._num_silent.get(template, 0) + 1
            return
        self._next_s[template] = now_s + self._every_s
        silent = self._num_silent.pop(template, 0)
        logger.warning(template + (f" (and {silent} more since the last such line)" if silent else ""), *values)


class Admission:
    """Who is connected, and who of them has no request that is whole."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.warnings = RareWarnings()
        self._open: set[Connection] = set()
        self._idle_since_s: dict[Connection, float] = {}  # the longest idle first

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """False if there is no room, and nobody who must make some."""
        if len(self._open) >= self.limits.max_connections and not self._make_room():
            self.warnings.warn(
                "Refused a connection: %d are open and have requests, the most there may be (--limit-concurrency).",
                len(self._open),
            )
            return False
        self._open.add(connection)
        self.is_idle(connection)
        return True

    def is_idle(self, connection: Connection) -> None:
        """It waits for a request, or for the rest of one."""
        if connection in self._open:
            self._idle_since_s.pop(connection, None)  # it goes to the end
            self._idle_since_s[connection] = time.monotonic()

    def has_request(self, connection: Connection) -> None:
        self._idle_since_s.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle_since_s.pop(connection, None)

    def _make_room(self) -> bool:
        longest_idle = next(iter(self._idle_since_s), None)
        if longest_idle is None:
            return False
        if time.monotonic() - self._idle_since_s[longest_idle] < self.limits.make_room_after_s:
            return False
        self.warnings.warn(
            "Closed a connection without a whole request, to make room: %d were open, the most there may be "
            "(--limit-concurrency).",
            len(self._open),
        )
        self.leave(longest_idle)
        longest_idle.make_room()
        return True
