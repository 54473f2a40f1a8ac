"""Shared: what the processes of a server with fronts have in common, for one of them: the board and the locks on rids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve.data_parallel import Load, Replica
from jaxserve.server.fronts.board import Board
from jaxserve.server.fronts.rid_locks import RidLocks


class Shared:
    def __init__(self, front: int | None, num_fronts: int, num_replicas: int) -> None:
        """`front`: which one this process is; None: the main process. Nothing can be asked before `open`."""
        self.num_processes = 1 + num_fronts
        self._front = front
        self._num_replicas = num_replicas
        self._board: Board | None = None
        self._rids: RidLocks | None = None

    def open(self, folder: Path) -> None:
        """In the server's private folder; by the main process first."""
        is_new = self._front is None
        self._board = Board(folder, self._front, self.num_processes - 1, self._num_replicas, is_new=is_new)
        self._rids = RidLocks(folder)

    @property
    def board(self) -> Board:
        assert self._board is not None, "open comes first"
        return self._board

    def close(self) -> None:
        if self._rids is not None:
            self._rids.close()
        self._rids = None

    def write(self, num_live: int, replicas: Sequence[Replica]) -> None:
        self.board.write(num_live, replicas)

    def num_live(self, own: int) -> int:
        """Of all processes, of which this one has so many."""
        return own + self.board.others_live

    def others_loads(self) -> list[Load]:
        return self.board.others_loads()

    def take_rids(self, rids: Sequence[str]) -> str | None:
        """All of them; or none, and returns the first that another process has."""
        assert self._rids is not None, "open comes first"
        for i, rid in enumerate(rids):
            if not self._rids.take(rid):
                for own in rids[:i]:
                    self._rids.free(own)
                return rid
        return None

    def free_rid(self, rid: str) -> None:
        if self._rids is not None:
            self._rids.free(rid)
