"""WorkerLink: a TokenizerManager's sockets to and from workers, on one asyncio loop.

It delivers what arrives to one function and knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from jaxserve.ipc import IpcPaths, Receiver, Sender
from jaxserve.messages import TOKENIZER, BatchStrOut, Message, TokenizerInput, WorkerAddress

logger = logging.getLogger(__name__)

# Messages read from the socket before other tasks get their turn.
_MESSAGES_PER_TURN = 64
# So many that are found waiting together say that this process is slower than the workers.
_BEHIND_MESSAGES = 3


class WorkerLink:
    def __init__(
        self,
        workers: Sequence[WorkerAddress],
        deliver: Callable[[Any], None],
        end_turn: Callable[[], None],
        *,
        own: WorkerAddress = WorkerAddress(TOKENIZER),
        kinds: Any = TokenizerInput,
    ) -> None:
        """`end_turn` is called when all messages that were read together have been delivered. `own`: where messages come to,
        of these `kinds`."""
        self._own = own
        self._kinds = kinds
        self.workers = tuple(workers)  # that serve
        # time.monotonic() of the last message about requests of each scheduler: its part of the pipeline works
        self.heartbeats_s: dict[WorkerAddress, float] = {}
        self.is_behind = False  # while a turn's messages are delivered: they are better handled together
        self._deliver = deliver
        self._end_turn = end_turn
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paths: IpcPaths | None = None
        self._context: zmq.Context[Any] | None = None
        self._receiver: Receiver | None = None
        self._senders: dict[WorkerAddress, Sender] = {}

    def open(self, paths: IpcPaths) -> None:
        """Opens the sockets and reads them on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._receiver = Receiver(self._context, paths.of(self._own), self._kinds)
        self._paths = paths
        for worker in self.workers:
            self.connect(worker)
        self._loop.add_reader(self._receiver.fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor only tells of changes

    def close(self) -> None:
        """Ends the sockets; what the workers have not read by now is dropped."""
        if self._loop is None or self._receiver is None or self._context is None:
            return
        self._loop.remove_reader(self._receiver.fd)
        self._receiver.close()
        for sender in self._senders.values():
            sender.close(linger_ms=0)
        self._context.term()
        self._receiver = self._context = None
        self._senders = {}

    def connect(self, worker: WorkerAddress) -> None:
        """Messages can be sent to it, and wait for it if it is not there yet."""
        assert self._context is not None and self._paths is not None, "open comes first"
        self._senders[worker] = Sender(self._context, self._paths.of(worker))

    def add(self, worker: WorkerAddress) -> None:
        """It serves from now on."""
        self.workers = tuple(sorted({*self.workers, worker}))

    def remove(self, worker: WorkerAddress) -> None:
        """It is gone, and with it what it has not read."""
        self.workers = tuple(other for other in self.workers if other != worker)
        self.heartbeats_s.pop(worker, None)
        if (sender := self._senders.pop(worker, None)) is not None:
            sender.close(linger_ms=0)

    def send(self, worker: WorkerAddress, message: Message) -> None:
        sender = self._senders.get(worker)
        if sender is not None:  # else the workers are gone, and with them whoever the message was for
            sender.send(message)

    def _read(self) -> None:
        receiver, loop = self._receiver, self._loop
        if receiver is None or loop is None:
            return
        messages = receiver.receive(_MESSAGES_PER_TURN)
        now_s = time.monotonic()
        for message in messages:
            if isinstance(message, BatchStrOut):
                self.heartbeats_s[message.source] = now_s
        self.is_behind = len(messages) >= _BEHIND_MESSAGES
        for message in messages:
            try:
                self._deliver(message)
            except Exception:  # one message must not keep the others from their receivers
                logger.exception("A message of type %s could not be handled.", type(message).__name__)
        self._end_turn()
        if receiver.left_some:
            loop.call_soon(self._read)
