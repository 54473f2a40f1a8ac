"""Leader: host 0's side of the connections to the others.

A thread of its own welcomes them, hears what became of commands, and notices who is lost, also while the scheduler waits for a
device that will never answer. What is to be run is sent by whoever runs it here.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from jaxserve.hosts.compare import difference
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
    Tick,
    Welcome,
    numbered,
)
from jaxserve.hosts.sockets import HostAddress, server
from jaxserve.messages import decoder, encode

logger = logging.getLogger(__name__)

_POLL_MS = 50
_LAST_WORDS_S = 0.3  # until they have left
_TICK_S = 0.5
# When a host is gone, steps fail everywhere, which may be noticed first: so long no other failure is taken for the cause.
_CAUSE_SHOWS_S = 1.5
# A host that is switched off is noticed by its heartbeats (`sockets`).
_LOSS_SHOWS_S = 7.0


@dataclasses.dataclass
class _Member:
    """A follower that was let in."""

    identity: bytes  # of its connection to the thread
    name: str
    failed_s: float = 0.0  # time.monotonic() of its last words
    error: str = ""  # those


class Leader:
    def __init__(self, address: HostAddress, hello: Hello, num_hosts: int, secret: bytes) -> None:
        """Listens from now on; `hello` describes this host. HostsError if the ports are not to be had."""
        self._address = address.resolved()
        self._hello = hello
        self._num_hosts = num_hosts
        self._context: zmq.Context[Any] = zmq.Context()
        self._control = server(self._context, self._address.control, secret)
        self._steps = server(self._context, self._address.steps, secret)
        self._monitor = self._control.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._changed = threading.Condition()
        # Under it:
        self._members: dict[int, _Member] = {}  # by rank
        self._failure: str | None = None
        self._replies: dict[int, tuple[dict[int, str], Future[dict[int, str]]]] = {}  # to commands, by number
        self._num_strangers = 0
        self._on_loss: Callable[[str], None] | None = None
        # Other threads' wishes.
        self._outbox: queue.SimpleQueue[FromLeader] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._sending = threading.Lock()  # the steps' connection
        self._identities: dict[int, bytes] = {}  # there, by rank
        self._trouble = ""  # that another thread found: the end of all hosts
        self._num_sent = 0
        self._decoder = decoder(FromFollower)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    # --- start and end

    @property
    def coordinator(self) -> str:
        """The address for jax.distributed."""
        return self._address.coordinator

    def gather(self, timeout_s: float, on_loss: Callable[[str], None]) -> None:
        """Waits until all are there and welcomes them. HostsError if one does not fit, or does not come. From then on `on_loss`
        is called, in the thread, when one is lost."""
        everybody = self._num_hosts - 1
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._members) == everybody, timeout_s)
            failure = self._failure or self._missing(timeout_s)
            if failure:
                raise HostsError(failure)
            self._on_loss = on_loss
        self._outbox.put(Welcome())

    def _missing(self, timeout_s: float) -> str | None:
        missing = [rank for rank in range(1, self._num_hosts) if rank not in self._members]
        if not missing:
            return None
        hint = f" {self._num_strangers} connections came with another secret." if self._num_strangers else ""
        which = "Host" if len(missing) == 1 else "Hosts"
        return f"{which} {', '.join(map(str, missing))} did not come to {self._address} within {timeout_s:g} s.{hint}"

    def wait_joined(self) -> None:
        """Until all are ready to run. Those that never will be are lost."""
        while len(self._identities) < self._num_hosts - 1:
            identity, frame = self._steps.recv_multipart()
            self._identities[msgspec.msgpack.decode(frame, type=Joined).rank] = identity

    def end(self, reason: str) -> None:
        """Tells the others. "": all is done."""
        self._outbox.put(Ended(reason=reason))
        self.close()

    def close(self) -> None:
        """Leaves, once what was to be said is: to the others host 0 is lost, unless it told them that it ends."""
        self._closing.set()
        self._thread.join()
        self._context.destroy()

    def let_loss_show(self) -> None:
        """After a failure that may be a lost host's fault: gives `on_loss`, which does not return, the time to be called."""
        time.sleep(_LOSS_SHOWS_S)

    @property
    def names(self) -> list[str]:
        """Of the machines, by rank."""
        return [self._hello.name, *(self._members[rank].name for rank in sorted(self._members))]

    # --- what is to be run

    def send(self, message: StepMessage) -> None:
        """To all, in the order of calls. One that is gone is the thread's to deal with."""
        with self._sending:
            frame = numbered(self._num_sent, message)
            self._num_sent += 1
            for rank, identity in self._identities.items():
                try:
                    self._steps.send_multipart((identity, frame), zmq.NOBLOCK, copy=False)
                except zmq.ZMQError:
                    self.fail(f"Host {rank} was lost: its connection for steps is gone.")

    def replies_to(self, number: int) -> Future[dict[int, str]]:
        """What the others will say of command `number`, by rank: why it failed, or "". Ask before it is sent."""
        everything: Future[dict[int, str]] = Future()
        with self._changed:
            self._replies[number] = ({}, everything)
        return everything

    def fail(self, reason: str) -> None:
        """All are to end, for a reason that was found elsewhere. The thread does it, a moment later."""
        self._trouble = self._trouble or reason

    # --- in the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("Other hosts are not heard any more.")
            self._give_up(f"Host 0 failed: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        next_tick_s = 0.0
        while not self._closing.is_set():
            if self._control.poll(_POLL_MS):
                identity, frame = self._control.recv_multipart()
                self._receive(identity, frame)
            while self._monitor.poll(0):
                recv_monitor_message(self._monitor)
                self._note_stranger()
            self._send_waiting()
            if time.monotonic() >= next_tick_s:
                self._look_after_all()
                next_tick_s = time.monotonic() + _TICK_S
        self._send_waiting()

    def _receive(self, identity: bytes, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            logger.error("Dropped a malformed frame of %d bytes of another host: %s", len(frame), error)
            return
        if isinstance(message, Hello):
            self._let_in(identity, message)
            return
        rank = next((rank for rank, member in self._members.items() if member.identity == identity), None)
        if rank is None:
            return
        if isinstance(message, CommandDone):
            self._note_reply(rank, message)
        elif isinstance(message, Failed):
            member = self._members[rank]
            member.failed_s, member.error = time.monotonic(), message.error

    def _let_in(self, identity: bytes, hello: Hello) -> None:
        known = self._members.get(hello.rank)
        objection = difference(self._hello, hello, self._num_hosts)
        if known is not None:
            objection = f"Two hosts have --node-rank {hello.rank}: {known.name} and {hello.name}."
        if objection is None:
            logger.info("Host %d of %d is there: %s.", hello.rank, self._num_hosts, hello.name)
            with self._changed:
                self._members[hello.rank] = _Member(identity, hello.name)
                self._changed.notify_all()
            return
        self._send_to(identity, Ended(reason=objection))
        if self._on_loss is None:  # a server that runs is not to be ended by whoever comes late
            self._give_up(objection)

    def _note_reply(self, rank: int, message: CommandDone) -> None:
        with self._changed:
            found, everything = self._replies[message.number]
            found[rank] = message.error
            is_last = len(found) == self._num_hosts - 1
            if is_last:
                del self._replies[message.number]
        if is_last:
            everything.set_result(found)

    def _note_stranger(self) -> None:
        if not self._num_strangers:
            logger.warning("Somebody with another secret tried to join the hosts at %s.", self._address)
        self._num_strangers += 1

    def _send_waiting(self) -> None:
        while not self._outbox.empty():
            message = self._outbox.get()
            for member in self._members.values():
                self._send_to(member.identity, message)

    def _look_after_all(self) -> None:
        gone = [rank for rank, member in self._members.items() if not self._send_to(member.identity, Tick())]
        failed = [rank for rank, member in self._members.items() if member.error]
        if gone:
            member = self._members.pop(gone[0])
            self._give_up(f"Host {gone[0]} ({member.name}) was lost: its connection is gone.")
        elif self._trouble:
            self._give_up(self._trouble)
        elif failed:
            member = self._members[failed[0]]
            if time.monotonic() - member.failed_s > _CAUSE_SHOWS_S:
                self._give_up(f"Host {failed[0]} ({member.name}) failed: {member.error}")

    def _give_up(self, reason: str) -> None:
        for member in self._members.values():
            self._send_to(member.identity, Ended(reason=reason))
        with self._changed:
            if self._failure is not None:
                return
            self._failure, on_loss = reason, self._on_loss
            self._changed.notify_all()
        if on_loss is not None:
            time.sleep(_LAST_WORDS_S)
            on_loss(reason)

    def _send_to(self, identity: bytes, message: FromLeader) -> bool:
        """Whether there is somebody."""
        try:
            self._control.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
