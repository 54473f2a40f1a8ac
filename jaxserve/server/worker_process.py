"""The child's side of a worker process: what every worker does before and after its own work.

A worker is started as `python -m <module> <ipc folder> <parent pid> <rank> <start>`. It ignores SIGINT and SIGTERM, because
only its parent decides when requests are drained; it dies with its parent, so that nothing is orphaned whatever happens; and
if it fails, it says why in a WorkerFailed before it exits with 1. What the worker does is a function it passes in.

The same function may be carried out in a thread of a program that is not ours (`jaxserve.server.threads`): a guest, who leaves
the process as it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.handover import Handover
from jaxserve.ipc import Channels, IpcPaths, SocketChannels
from jaxserve.mailboxes import MailboxClosedError
from jaxserve.messages import TOKENIZER, WorkerAddress, WorkerFailed
from jaxserve.server.logs import configure_logging

SHOW_STACKS = signal.SIGQUIT  # of all threads, on stderr; the process goes on
_PR_SET_PDEATHSIG = 1
_PARENT_POLL_S = 1.0


_ARGS_FILE = "server_args.json"


def write_args(folder: Path, args: ServerArgs) -> None:
    """Leaves the options for the workers, without the keys that only the HTTP server needs."""
    data = msgspec.json.encode(args.replace(api_key=None, admin_api_key=None, ssl_keyfile_password=None))
    file = os.open(folder / _ARGS_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(data)


def read_args(folder: Path) -> ServerArgs:
    return msgspec.json.decode((folder / _ARGS_FILE).read_bytes(), type=ServerArgs)


class UserError(Exception):
    """Start-up failed for a reason the user can mend; one sentence, no traceback wanted."""


@dataclasses.dataclass(frozen=True)
class Guest:
    """What a worker that is a thread of somebody else's program is given beside."""

    devices: Sequence[Any]  # jax.Device: those that it may use
    handover: Handover
    leave: Callable[[], None]  # its thread hangs, and counts as ended
    is_told_to_end: Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """What a worker is given."""

    address: WorkerAddress
    args: ServerArgs
    channels: Channels
    guest: Guest | None = None  # None: its process is its own

    @property
    def folder(self) -> Path:
        """The engine's private folder."""
        return self.channels.folder

    @property
    def is_told_to_end(self) -> bool:
        """A process is killed instead."""
        return self.guest is not None and self.guest.is_told_to_end()

    def last_words(self, error: str, *, is_user_error: bool = False) -> None:
        """Tells whoever started it why this worker is about to end. May be called from any thread."""
        failed = WorkerFailed(worker=self.address, error=error, is_user_error=is_user_error)
        self.channels.send_once(WorkerAddress(TOKENIZER), failed)

    def give_up(self, reason: str) -> None:
        """Ends the worker from another thread, while its own may wait for devices that are gone."""
        self.last_words(reason)
        if self.guest is None:
            os._exit(1)
        self.guest.leave()


def run_worker(kind: str, work: Callable[[WorkerContext], None], argv: list[str] | None = None) -> int:
    """Runs `work` as a worker process; returns its exit status."""
    folder, parent_pid, rank, start = (argv if argv is not None else sys.argv[1:])[:4]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(SHOW_STACKS, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SHOW_STACKS})
    die_with_parent(int(parent_pid))
    channels = SocketChannels(IpcPaths(Path(folder)))
    context = WorkerContext(WorkerAddress(kind, int(rank), int(start)), read_args(channels.folder), channels)
    configure_logging(context.args.log_level, str(context.address))
    try:
        return carry_out(work, context)
    finally:
        channels.close()  # when everything has left


def carry_out(work: Callable[[WorkerContext], None], context: WorkerContext) -> int:
    """Does the work; returns the exit status. If that is not 0 the last words have been said."""
    try:
        work(context)
    except MailboxClosedError:
        return 0  # it was told to end
    except UserError as error:
        context.last_words(str(error), is_user_error=True)
        return 1
    except Exception as error:
        logging.getLogger(__name__).exception("The %s failed.", context.address)
        context.last_words(f"{type(error).__name__}: {error}")
        return 1
    return 0


def exit_now(status: int) -> NoReturn:
    """Without taking Python down: a thread that is in XLA meanwhile, loading a program, would abort the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def die_with_parent(parent_pid: int) -> None:
    """From now on this process is killed when its parent is gone."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        if os.getppid() != parent_pid:  # it died before prctl could see it
            os._exit(1)
        return
    threading.Thread(target=_exit_without_parent, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _exit_without_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
