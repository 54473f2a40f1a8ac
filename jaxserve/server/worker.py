"""A worker as whoever started it sees it, whether it is a process (`process_worker`) or a thread (`threads`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from jaxserve.ipc import Channels
from jaxserve.messages import WorkerAddress, WorkerFailed


class WorkerDiedError(Exception):
    """A worker ended although nobody asked it to. The text is the reason, for the operator."""

    def __init__(
        self,
        reason: str,
        for_clients: str = "The server failed.",
        *,
        is_user_error: bool = False,
        worker: WorkerAddress | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.status = status  # its process's
        self.worker = worker
        self.for_clients = for_clients
        self.is_user_error = is_user_error  # an option or a file the user can mend


class Worker(Protocol):
    """One that runs, or has."""

    address: WorkerAddress
    pid: int  # of the process that it is, or is in
    last_words: WorkerFailed | None

    @property
    def status(self) -> int | None:
        """As a process's; None: it runs."""
        ...

    def notify_exit(self, loop: asyncio.AbstractEventLoop, exited: Callable[[], None]) -> None:
        """Calls `exited` on `loop` when it has ended and its output is complete."""
        ...

    def kill(self) -> None:
        """Ends it without waiting for what it does; a thread, when it looks next."""
        ...

    def show_stacks(self) -> None:
        """On stderr, of all its threads."""
        ...

    def obituary(self) -> WorkerDiedError:
        """Why it ended, in the best words there are."""
        ...


class Launchable(Protocol):
    """How to start one worker."""

    @property
    def address(self) -> WorkerAddress: ...

    def launch(self, channels: Channels) -> Worker:
        """The calling thread must outlive a process: the kernel ends it with the thread that began it."""
        ...

    def again(self) -> Launchable:
        """In place of one that has ended."""
        ...


def obituary(
    address: WorkerAddress, what: str, last_words: WorkerFailed | None, otherwise: str, status: int | None
) -> WorkerDiedError:
    """Of a worker that is a `what`: its last words, or `otherwise`, how it ended without any."""
    is_user_error = last_words is not None and last_words.is_user_error
    if last_words is None:
        reason = f"The {address} {what} {otherwise}"
    else:
        reason = last_words.error if is_user_error else f"The {address} {what} failed: {last_words.error}"
    for_clients = f"The server's {address} {what} ended."
    return WorkerDiedError(reason, for_clients, is_user_error=is_user_error, worker=address, status=status)
