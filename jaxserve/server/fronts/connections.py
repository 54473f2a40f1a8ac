"""The port's connections, from the main process, which accepts them, to the fronts, which serve them.

    client ──► listener ──► ConnectionGiver ──descriptor──► receive_connections ──► HttpServer.adopt

Each goes to the front that has the fewest. So a port has one owner, who finds it in use or not, and a few connections that
stay are shared as evenly as many that do not. The socket that brings them also brings the keys, which no file holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.server.fronts.board import Board

logger = logging.getLogger(__name__)

_FILE = "connections.sock"
_PER_TURN = 64  # connections accepted before other tasks get their turn
_RETRY_S = 0.05  # when no front can take one, or no more descriptors are to be had
_MOST_WELCOME_BYTES = 1 << 16
_RANK_BYTES = 2
_HERE = b"\0"  # a packet needs a byte beside the descriptor


class Welcome(msgspec.Struct):
    """What a front is told when it comes."""

    started_s: int  # Unix time at which the server did
    api_key: str | None = None
    admin_api_key: str | None = None
    ssl_keyfile_password: str | None = None

    @staticmethod
    def of(args: ServerArgs) -> Welcome:
        return Welcome(int(time.time()), args.api_key, args.admin_api_key, args.ssl_keyfile_password)

    def with_keys(self, args: ServerArgs) -> ServerArgs:
        keys = {"api_key": self.api_key, "admin_api_key": self.admin_api_key}
        return args.replace(**keys, ssl_keyfile_password=self.ssl_keyfile_password)


class ConnectionGiver:
    """The main process's side, on its loop."""

    def __init__(self, listener: socket.socket, welcome: Welcome) -> None:
        self._listener = listener
        self._welcome = welcome
        self._door: socket.socket | None = None  # where fronts come to
        self._coming: set[socket.socket] = set()  # fronts that do not serve yet
        self._fronts: dict[int, socket.socket] = {}
        self._num_given: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._board: Board | None = None

    def open(self, folder: Path, board: Board) -> None:
        """Before the fronts are started. Connections wait until the first of them is there."""
        self._loop, self._board = asyncio.get_running_loop(), board
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(str(folder / _FILE))
        self._door.listen()
        self._door.setblocking(False)
        self._loop.add_reader(self._door, self._let_in)

    def close(self) -> None:
        """No more are accepted."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._listener)
        if self._door is not None:
            self._loop.remove_reader(self._door)
            self._door.close()
        for front in self._coming:
            self._loop.remove_reader(front)
        for front in (*self._coming, *self._fronts.values()):
            front.close()
        self._fronts, self._coming = {}, set()
        self._door = self._loop = None

    def _let_in(self) -> None:
        assert self._door is not None and self._loop is not None
        with contextlib.suppress(BlockingIOError):
            front, _ = self._door.accept()
            front.setblocking(False)
            front.send(msgspec.json.encode(self._welcome))
            self._coming.add(front)
            self._loop.add_reader(front, self._begin, front)

    def _begin(self, front: socket.socket) -> None:
        """It says its rank when it can serve, and nothing else; from then on it gets connections."""
        assert self._loop is not None
        self._loop.remove_reader(front)
        self._coming.discard(front)
        said = b""
        with contextlib.suppress(OSError):
            said = front.recv(_RANK_BYTES)
        if not said:  # it has died
            front.close()
            return
        if not self._fronts:
            self._loop.add_reader(self._listener, self._accept)
        rank = int.from_bytes(said)
        self._fronts[rank], self._num_given[rank] = front, 0

    def _accept(self) -> None:
        for _ in range(_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("No connection can be accepted: %s.", error.strerror)
                self._rest()
                return
            with connection:
                if not self._give(connection):
                    logger.error("No front process takes connections: one was closed.")
                    self._rest()
                    return

    def _rest(self) -> None:
        """So that what does not work is not tried without end."""
        loop = self._loop
        assert loop is not None
        loop.remove_reader(self._listener)
        loop.call_later(_RETRY_S, lambda: self._loop is not None and loop.add_reader(self._listener, self._accept))

    def _give(self, connection: socket.socket) -> bool:
        board = self._board
        assert board is not None
        for rank in sorted(self._fronts, key=lambda rank: (self._num_given[rank] - board.num_closed(rank), rank)):
            try:
                socket.send_fds(self._fronts[rank], [_HERE], [connection.fileno()])
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS):
                    logger.error("Front %d takes no connection: %s.", rank, error.strerror)
                continue
            self._num_given[rank] += 1
            return True
        return False


def connect(folder: Path) -> tuple[socket.socket, Welcome]:
    """A front's way to the main process, and what it is told there. Blocks until then."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.connect(str(folder / _FILE))
    welcome = msgspec.json.decode(door.recv(_MOST_WELCOME_BYTES), type=Welcome)
    door.setblocking(False)
    return door, welcome


def receive_connections(door: socket.socket, rank: int, take: Callable[[socket.socket], None]) -> None:
    """From now on, on the running loop, `take` is given each connection of the front with this rank."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        for _ in range(_PER_TURN):
            try:
                data, descriptors, _flags, _address = socket.recv_fds(door, len(_HERE), 1)
            except BlockingIOError:
                return
            if not data:  # the main process accepts no more
                loop.remove_reader(door)
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                take(connection)

    loop.add_reader(door, read)
    door.send(rank.to_bytes(_RANK_BYTES))
