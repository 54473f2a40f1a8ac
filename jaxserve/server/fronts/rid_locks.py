"""RidLocks: request ids that clients choose belong to one request of the whole server at a time, whichever process has it.

A rid is a byte of a file, at a place that its hash says, and who has the rid holds the lock on that byte. The kernel looks
after the locks: taking one costs microseconds, and those of a process that has died are free. Nothing is ever written to the
file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

_FILE = "rids"
_PLACES = (1 << 62) - 1


class RidLocks:
    def __init__(self, folder: Path) -> None:
        # The only descriptor of the file in this process: closing any other would free all its locks.
        self._file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, rid: str) -> bool:
        """False if another process has it. Whether this one has it already is not seen here: locks are of processes."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(rid))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def free(self, rid: str) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(rid))

    def close(self) -> None:
        os.close(self._file)


def _place(rid: str) -> int:
    digest = hashlib.blake2b(rid.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) & _PLACES
