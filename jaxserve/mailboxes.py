"""Channels between workers that are threads of one process: queues, in which messages are passed as they are.

Whoever sends a message has no more to do with it. A worker is ended by closing its mailbox: it hears of that when it looks for
messages the next time.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.messages import Message, WorkerAddress


class MailboxClosedError(Exception):
    """Whoever has it is to end."""


class Mailbox:
    """Of one worker: both ends of the way to it. May be sent to from any thread, and is read by one."""

    def __init__(self) -> None:
        self.left_some = False
        self.is_closed = False
        self._messages: collections.deque[Message] = collections.deque()
        self._arrived = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches
        self._read: Callable[[], None] = lambda: None
        self._is_told = False  # the loop will read
        self._is_woken = False

    def send(self, message: Message) -> None:
        if self.is_closed:
            return  # with whoever it was for
        self._messages.append(message)
        if not self._arrived.is_set():
            self._arrived.set()
        if self._loop is not None:
            self._tell(self._loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_told:
            return
        self._is_told = True
        try:
            loop.call_soon_threadsafe(self._read)
        except RuntimeError:  # it has been closed: nobody reads any more
            self.end()

    def receive(self, most: int = 1024) -> list[Message]:
        """Raises MailboxClosedError."""
        if self.is_closed:
            raise MailboxClosedError
        self._is_told = False  # before looking: what comes from now on is told of
        messages: list[Message] = []
        while self._messages and len(messages) < most:
            messages.append(self._messages.popleft())
        self.left_some = bool(self._messages)
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Raises MailboxClosedError."""
        if not self._messages:
            self._arrived.clear()
            if not self._messages and not self.is_closed and not self._is_woken:  # nothing came in between
                self._arrived.wait(timeout_s)
        self._is_woken = False
        if self.is_closed:
            raise MailboxClosedError
        return bool(self._messages)

    def wake(self) -> None:
        self._is_woken = True
        self._arrived.set()

    def watch(self, loop: asyncio.AbstractEventLoop, read: Callable[[], None]) -> None:
        self._read, self._loop = read, loop
        self._tell(loop)

    def close(self, linger_ms: int | None = None) -> None:
        """Of one end: the other one may still be used."""
        self._loop = None

    def end(self) -> None:
        """What was sent is gone; nothing arrives any more."""
        self.is_closed = True
        self._messages.clear()
        self._arrived.set()


class Mailboxes:
    """Of the workers of one engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._boxes: dict[WorkerAddress, Mailbox] = {}
        self._lock = threading.Lock()

    def of(self, worker: WorkerAddress) -> Mailbox:
        with self._lock:
            return self._boxes.setdefault(worker, Mailbox())

    def inbox(self, worker: WorkerAddress, kinds: Any) -> Mailbox:
        """Senders are typed: nobody sends what is not of those kinds."""
        return self.of(worker)

    def outbox(self, worker: WorkerAddress) -> Mailbox:
        return self.of(worker)

    def send_once(self, worker: WorkerAddress, message: Message) -> None:
        self.of(worker).send(message)

    def close(self) -> None:
        for box in list(self._boxes.values()):
            box.end()
