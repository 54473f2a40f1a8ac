"""Workers that are threads of the program that the Engine is in, on the devices that it holds.

The same work as in processes, with queues in place of sockets. A thread cannot be killed: it ends when it looks for messages
and finds its mailbox closed. One that hangs counts as ended all the same; its requests get an error, and the program decides
what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.handover import Handover
from jaxserve.ipc import Channels, private_folder
from jaxserve.mailboxes import Mailbox, Mailboxes
from jaxserve.messages import DETOKENIZER, SCHEDULER, WorkerAddress, WorkerFailed
from jaxserve.server import detokenizer, scheduler_process
from jaxserve.server.worker import WorkerDiedError, obituary
from jaxserve.server.worker_process import Guest, WorkerContext, carry_out

_LEFT = 1  # status of one that hangs


@contextlib.contextmanager
def between_threads(args: ServerArgs) -> Iterator[Mailboxes]:
    """Channels of an engine whose workers are threads."""
    with private_folder() as paths:
        channels = Mailboxes(paths.folder)
        try:
            yield channels
        finally:
            channels.close()


def thread_commands(
    args: ServerArgs,
    devices: Sequence[Any],
    handover: Handover,
    schedule: Callable[[WorkerContext], None] = scheduler_process.work,
) -> tuple[ThreadCommand, ...]:
    """`devices` (jax.Device) are divided among the replicas, in order. `schedule`: another scheduler's work, for tests."""
    share = args.num_devices
    schedulers = (
        ThreadCommand(SCHEDULER, rank, args, schedule, handover, tuple(devices[rank * share : (rank + 1) * share]))
        for rank in range(args.dp_size)
    )
    detokenizers = (
        ThreadCommand(DETOKENIZER, rank, args, detokenizer.work, handover) for rank in range(args.detokenizer_worker_num)
    )
    return (*schedulers, *detokenizers)


@dataclasses.dataclass(frozen=True)
class ThreadCommand:
    """How to start one of them."""

    kind: str
    rank: int
    args: ServerArgs
    work: Callable[[WorkerContext], None]
    handover: Handover
    devices: Sequence[Any] = ()
    start: int = 0

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.kind, self.rank, self.start)

    def again(self) -> ThreadCommand:
        return dataclasses.replace(self, start=self.start + 1)

    def launch(self, channels: Channels) -> ThreadWorker:
        assert isinstance(channels, Mailboxes), "threads have mailboxes"
        return ThreadWorker(self, channels)


class ThreadWorker:
    def __init__(self, command: ThreadCommand, channels: Mailboxes) -> None:
        self.address = command.address
        self.pid = os.getpid()
        self.last_words: WorkerFailed | None = None
        self.status: int | None = None
        self._mailbox: Mailbox = channels.of(self.address)
        self._ended = threading.Event()
        guest = Guest(command.devices, command.handover, self._leave, lambda: self._mailbox.is_closed)
        context = WorkerContext(self.address, command.args, channels, guest)
        self._thread = threading.Thread(
            target=self._run, args=(command.work, context), name=f"jaxserve-{self.address}", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[WorkerContext], None], context: WorkerContext) -> None:
        status = carry_out(work, context)
        if self.status is None:
            self.status = status
        self._ended.set()

    def _leave(self) -> None:
        """Whatever the thread waits for; if it comes, it finds its mailbox closed."""
        self.status = _LEFT
        self._mailbox.end()
        self._ended.set()

    def notify_exit(self, loop: asyncio.AbstractEventLoop, exited: Callable[[], None]) -> None:
        def wait() -> None:
            self._ended.wait()
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is interested any more
                loop.call_soon_threadsafe(exited)

        threading.Thread(target=wait, name=f"jaxserve-{self.address}-exit", daemon=True).start()

    def kill(self) -> None:
        self._mailbox.end()

    def show_stacks(self) -> None:
        faulthandler.dump_traceback(all_threads=True)

    def obituary(self) -> WorkerDiedError:
        return obituary(self.address, "thread", self.last_words, "ended.", self.status)
