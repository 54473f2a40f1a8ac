"""Board: numbers that each process of a server writes and all may read, in shared memory.

A process writes its own row alone, so there are no locks. Numbers are read one by one: of a row that is being written some
may be older than others, which is good enough to balance loads by, and counts that must be exact are read when nothing
changes them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxserve.data_parallel import Load, Replica

_FILE = "board"
_LIVE, _CLOSED, _FIRST_LOAD = 0, 1, 2
_PER_REPLICA = len(Load._fields)


class Board:
    """`front` None: the main process's row."""

    def __init__(self, folder: Path, front: int | None, num_fronts: int, num_replicas: int, *, is_new: bool = False) -> None:
        """Opens it in the private folder; the main process makes it, before it starts the others."""
        shape = (1 + num_fronts, _FIRST_LOAD + num_replicas * _PER_REPLICA)
        path = folder / _FILE
        if is_new:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        mapped = np.memmap(path, np.float64, "w+" if is_new else "r+", shape=shape)
        self._all = np.asarray(mapped)  # whose items cost a fraction of a memmap's
        self._own = self._all[0 if front is None else 1 + front]

    # --- what this process says of itself

    def write(self, num_live: int, replicas: Sequence[Replica]) -> None:
        """What it has sent to each of the replicas, and how many of its sequences have not ended."""
        loads = [number for replica in replicas for number in replica.load]
        self._own[_FIRST_LOAD:] = loads
        self._own[_LIVE] = num_live

    def connection_closed(self) -> None:
        self._own[_CLOSED] += 1

    # --- what others and all say

    @property
    def others_live(self) -> int:
        """Sequences of the other processes that have not ended."""
        return int(self._all[:, _LIVE].sum() - self._own[_LIVE])

    def others_loads(self) -> list[Load]:
        """What the other processes together have sent to each replica."""
        sums = self._all[:, _FIRST_LOAD:].sum(axis=0) - self._own[_FIRST_LOAD:]
        return [Load(*numbers) for numbers in sums.reshape(-1, _PER_REPLICA).tolist()]

    def num_closed(self, front: int) -> int:
        """Connections of a front that have ended."""
        return int(self._all[1 + front, _CLOSED])
