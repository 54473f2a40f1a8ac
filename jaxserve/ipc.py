"""How messages get from one worker of an engine to another: `Channels`, and those over sockets between processes.

A ZMQ PULL socket per receiving process, in a folder that only this user can open. Senders connect with PUSH and
never block: there is no high-water mark, because a sender that waits for its receiver could wait for itself. The contents of
messages are none of this module's business; it only knows `jaxserve.messages.encode` and `decoder`. Workers that are threads of
one process have `jaxserve.mailboxes`.

Whoever made a folder holds a lock in it as long as it lives. So a folder whose process was killed is told from one in use,
whatever process has that number now, and the next start removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from jaxserve.messages import DETOKENIZER, SCHEDULER, TOKENIZER, Message, WorkerAddress, decoder, encode

logger = logging.getLogger(__name__)

# What sockaddr_un holds on Linux (108) and macOS (104), without the closing NUL. The smaller of both: one rule everywhere.
LONGEST_SOCKET_PATH = 103
# Frames read together hold at most one more than these: decoding takes about 10 ns a byte, and somebody waits meanwhile.
MOST_BYTES_TOGETHER = 256 * 1024
# How long a closing sender waits for its last messages to leave.
LINGER_MS = 2000
_LONGEST_NAMES = (WorkerAddress(DETOKENIZER, 99), WorkerAddress(SCHEDULER, 99, 999))
_PREFIX = "jaxserve-"
_LOCK = "lock"


class Inbox(Protocol):
    """The receiving end of one worker."""

    left_some: bool  # the last `receive` took as many as it may

    def receive(self, most: int = 1024) -> list[Any]:
        """Messages that are waiting, the first of them if they are many. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a message is waiting, somebody wakes it, or the time is over."""
        ...

    def wake(self) -> None:
        """Ends a `wait`, where that can be done. In any thread."""
        ...

    def watch(self, loop: asyncio.AbstractEventLoop, read: Callable[[], None]) -> None:
        """From now on `read` is called on the loop whenever messages may be waiting; after a `receive` that left some it must
        be called again."""
        ...

    def close(self) -> None: ...


class Outbox(Protocol):
    """The sending end towards one worker. Messages wait for one that is not there yet."""

    def send(self, message: Message) -> None:
        """Never blocks."""
        ...

    def close(self, linger_ms: int | None = None) -> None:
        """`linger_ms`: how long what was sent may take to leave."""
        ...


class Channels(Protocol):
    """Between the workers of one engine, as one of them has them."""

    @property
    def folder(self) -> Path:
        """The private folder of the engine."""
        ...

    def inbox(self, worker: WorkerAddress, kinds: Any) -> Inbox:
        """Of that worker, which is the caller, for messages of those kinds."""
        ...

    def outbox(self, worker: WorkerAddress) -> Outbox: ...

    def send_once(self, worker: WorkerAddress, message: Message) -> None:
        """From a thread that owns no end, such as a watchdog."""
        ...

    def close(self) -> None:
        """All ends are closed."""
        ...


@dataclasses.dataclass(frozen=True)
class IpcPaths:
    """The private folder of one running engine, and the addresses of its sockets in there."""

    folder: Path
    lock: int | None = dataclasses.field(default=None, compare=False)  # descriptor of the lock's file; None: another's folder

    @staticmethod
    def create() -> IpcPaths:
        """A new folder with mode 0700. Raises ValueError if the system's temporary folder has too long a name for sockets."""
        _remove_dead_folders()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        paths = IpcPaths(folder, _lock(folder))
        length = max(len(os.fsencode(paths.of(worker).removeprefix("ipc://"))) for worker in _LONGEST_NAMES)
        if length > LONGEST_SOCKET_PATH:
            paths.remove()
            raise ValueError(
                f"The temporary folder {folder.parent} makes socket paths of {length} bytes; the system's limit is "
                f"{LONGEST_SOCKET_PATH}. Set TMPDIR to a shorter path."
            )
        return paths

    def of(self, worker: WorkerAddress) -> str:
        """Of a worker that is started again not that of the one before, for which messages may still be on their way."""
        start = f"-{worker.start}" if worker.start else ""
        return f"ipc://{self.folder / f'{worker.kind}-{worker.rank}{start}.ipc'}"

    @property
    def tokenizer(self) -> str:
        return self.of(WorkerAddress(TOKENIZER))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


@contextlib.contextmanager
def private_folder() -> Iterator[IpcPaths]:
    """As `IpcPaths.create` makes it, as long as it is needed."""
    paths = IpcPaths.create()
    try:
        yield paths
    finally:
        paths.remove()


def _lock(folder: Path) -> int:
    """Locked before it has its name: whoever finds it there finds it locked."""
    unnamed = folder / f"{_LOCK}.new"
    file = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then the folder stays if its process is killed
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(folder / _LOCK)
    return file


def _remove_dead_folders() -> None:
    """This user's, whose processes were killed. One without a lock is left alone: it may be about to get it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or removed meanwhile
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    """OSError if it is in use."""
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        logger.info("Removed %s, which a process that was killed had left.", folder)
    finally:
        os.close(file)


class Receiver:
    """The receiving end of one process. Frames that are no message of the expected kinds are logged and dropped."""

    def __init__(self, context: zmq.Context[Any], address: str, kinds: Any) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decoder = decoder(kinds)
        self._name = address.rsplit("/", 1)[-1]
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches
        self.left_some = False  # the last `receive` read as much as it may

    @property
    def fd(self) -> int:
        """Readable when messages may be waiting; edge-triggered, so read on while `receive` may have left some."""
        return int(self._socket.getsockopt(zmq.FD))

    def watch(self, loop: asyncio.AbstractEventLoop, read: Callable[[], None]) -> None:
        self._loop = loop
        loop.add_reader(self.fd, read)
        loop.call_soon(read)  # the descriptor only tells of changes

    def receive(self, most: int = 1024) -> list[Any]:
        """All messages that are waiting, up to `most` and MOST_BYTES_TOGETHER. Never blocks."""
        messages: list[Any] = []
        self.left_some, num_bytes = True, 0
        while len(messages) < most and num_bytes < MOST_BYTES_TOGETHER:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self.left_some = False
                break
            num_bytes += len(frame)
            try:
                messages.append(self._decoder.decode(frame))
            except (msgspec.MsgspecError, ValueError, TypeError) as error:
                logger.error("Dropped a malformed frame of %d bytes on %s: %s", len(frame), self._name, error)
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Blocks until a message is waiting, or the time is over."""
        return bool(self._socket.poll(max(0, round(timeout_s * 1000)), zmq.POLLIN))

    def wake(self) -> None:
        pass  # a socket belongs to one thread

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
        self._socket.close()


class Sender:
    """The sending end towards one process. Like every ZMQ socket it belongs to one thread."""

    def __init__(self, context: zmq.Context[Any], address: str, linger_ms: int = LINGER_MS) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self, linger_ms: int | None = None) -> None:
        self._socket.close(linger_ms)


def send_once(address: str, message: Message) -> None:
    """Sends from a thread that owns no socket, such as a watchdog: opens one, waits for it to deliver, closes it."""
    with zmq.Context() as context:
        sender = Sender(context, address)
        sender.send(message)
        sender.close()


class SocketChannels:
    """Of a process. Their ends belong to the thread that asked for them."""

    def __init__(self, paths: IpcPaths) -> None:
        self._paths = paths
        self._context: zmq.Context[Any] = zmq.Context()

    @property
    def folder(self) -> Path:
        return self._paths.folder

    def inbox(self, worker: WorkerAddress, kinds: Any) -> Receiver:
        return Receiver(self._context, self._paths.of(worker), kinds)

    def outbox(self, worker: WorkerAddress) -> Sender:
        return Sender(self._context, self._paths.of(worker))

    def send_once(self, worker: WorkerAddress, message: Message) -> None:
        send_once(self._paths.of(worker), message)

    def close(self) -> None:
        self._context.term()
