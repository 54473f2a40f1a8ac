"""Follower: the side of a host that does what host 0 says.

Its thread hears when all is to end, also while a step waits for devices of a host that is gone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from jaxserve.hosts.protocol import (
    CommandDone,
    Ended,
    Failed,
    FromFollower,
    FromLeader,
    Hello,
    HostsError,
    Joined,
    StepMessage,
    Welcome,
    read_numbered,
)
from jaxserve.hosts.sockets import HostAddress, client
from jaxserve.messages import decoder, encode

logger = logging.getLogger(__name__)

_POLL_MS = 50
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
# A handshake also fails if host 0 ends just then.
_FAILURES_OF_ANOTHER_SECRET = 3
# After a failure here: how long host 0 may take to say that another host's was the first.
_REASON_S = 8.0


class Follower:
    def __init__(self, address: HostAddress, hello: Hello, secret: bytes) -> None:
        self._address = address
        self._hello = hello
        self._context: zmq.Context[Any] = zmq.Context()
        self._control = client(self._context, secret)
        self._monitor = self._control.get_monitor_socket()
        self._steps = client(self._context, secret)
        self._decoder = decoder(FromLeader)
        self._outbox: queue.SimpleQueue[FromFollower] = queue.SimpleQueue()
        self._num_received = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def coordinator(self) -> str:
        """The address of jax.distributed."""
        return self._address.coordinator

    def join(self, timeout_s: float) -> None:
        """Says Hello as often as it takes. HostsError if host 0 does not want this host, or is not there in time; how long it
        waits for others is for host 0 to say."""
        self._control.connect(self._address.control)
        logger.info("Waiting for host 0 at %s and for all others.", self._address)
        deadline_s, num_failures, is_there = time.monotonic() + timeout_s, 0, False
        while is_there or time.monotonic() < deadline_s:
            if self._control.poll(_POLL_MS):
                message = self._decoder.decode(self._control.recv())
                if isinstance(message, Welcome):
                    return
                if isinstance(message, Ended):
                    raise HostsError(message.reason or "Host 0 has ended.")
            for event in self._events():
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:  # to a host 0 that was started again, too
                    is_there = True
                    self._control.send(encode(self._hello))
                elif event == zmq.EVENT_DISCONNECTED:
                    is_there = False
                num_failures += event in _HANDSHAKE_FAILED
            if num_failures >= _FAILURES_OF_ANOTHER_SECRET:
                raise HostsError(f"Host 0 at {self._address} does not take this host: it has another secret.")
        raise HostsError(f"There was no answer from host 0 at {self._address} within {timeout_s:g} s.")

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Calls `on_end` once, in a thread, when host 0 has ended or is gone: with "" or the reason."""
        self._thread = threading.Thread(target=self._run, args=(on_end,), name="hosts", daemon=True)
        self._thread.start()

    def start_steps(self) -> None:
        """Once this host is ready to run."""
        self._steps.connect(self._address.steps)
        self._steps.send(encode(Joined(rank=self._hello.rank)))

    def receive(self, timeout_s: float) -> StepMessage | None:
        """What is to be run next, if it comes in time. HostsError if something was lost before it, or once this host leaves."""
        if self._closing.is_set():
            raise HostsError("This host has left.")
        if not self._steps.poll(round(timeout_s * 1000)):
            return None
        message = read_numbered(self._steps.recv(), self._num_received)
        self._num_received += 1
        return message

    def report(self, number: int, error: str) -> None:
        """What became of a command. From any thread."""
        self._outbox.put(CommandDone(number=number, error=error))

    def fail(self, error: str) -> None:
        """Last words. Does not return while `on_end` may still be called, with what host 0 makes of them."""
        self._outbox.put(Failed(error=error))
        time.sleep(_REASON_S)

    def close(self) -> None:
        """Leaves: to host 0 this host is lost."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self, on_end: Callable[[str], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._closing.is_set():
            while not self._outbox.empty():
                self._control.send(encode(self._outbox.get()))
            poller.poll(_POLL_MS)
            # First how the connection is, then what came by it: last words may arrive, and it be gone, between two looks.
            is_gone = zmq.EVENT_DISCONNECTED in self._events()
            while self._control.poll(0):
                message = self._decoder.decode(self._control.recv())
                if isinstance(message, Ended):
                    on_end(message.reason)
                    return
            if is_gone:  # and nothing more was said. JAX aborts the process a moment later
                on_end(f"Host 0 at {self._address} was lost: its connection is gone.")
                return

    def _events(self) -> list[int]:
        events = []
        while self._monitor.poll(0):
            events.append(int(recv_monitor_message(self._monitor)["event"]))
        return events
