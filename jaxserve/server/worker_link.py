"""WorkerLink: a TokenizerManager's channels to and from workers, on one asyncio loop.

It delivers what arrives to one function and knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.ipc import Channels, Inbox, Outbox
from jaxserve.messages import TOKENIZER, BatchStrOut, Message, TokenizerInput, WorkerAddress

logger = logging.getLogger(__name__)

# Messages read before other tasks get their turn.
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
        self._channels: Channels | None = None
        self._inbox: Inbox | None = None
        self._outboxes: dict[WorkerAddress, Outbox] = {}

    def open(self, channels: Channels) -> None:
        """Opens its ends of the channels and reads on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._channels = channels
        self._inbox = channels.inbox(self._own, self._kinds)
        for worker in self.workers:
            self.connect(worker)
        self._inbox.watch(self._loop, self._read)

    def close(self) -> None:
        """Closes them; what the workers have not read by now is dropped."""
        if self._inbox is None:
            return
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.close(linger_ms=0)
        self._inbox, self._outboxes = None, {}

    def connect(self, worker: WorkerAddress) -> None:
        """Messages can be sent to it, and wait for it if it is not there yet."""
        assert self._channels is not None, "open comes first"
        self._outboxes[worker] = self._channels.outbox(worker)

    def add(self, worker: WorkerAddress) -> None:
        """It serves from now on."""
        self.workers = tuple(sorted({*self.workers, worker}))

    def remove(self, worker: WorkerAddress) -> None:
        """It is gone, and with it what it has not read."""
        self.workers = tuple(other for other in self.workers if other != worker)
        self.heartbeats_s.pop(worker, None)
        if (outbox := self._outboxes.pop(worker, None)) is not None:
            outbox.close(linger_ms=0)

    def send(self, worker: WorkerAddress, message: Message) -> None:
        outbox = self._outboxes.get(worker)
        if outbox is not None:  # else the workers are gone, and with them whoever the message was for
            outbox.send(message)

    def _read(self) -> None:
        inbox, loop = self._inbox, self._loop
        if inbox is None or loop is None:
            return
        messages = inbox.receive(_MESSAGES_PER_TURN)
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
        if inbox.left_some:
            loop.call_soon(self._read)
