"""A claim to compile one program: of several processes with one cache folder, one compiles it and the others load it.

Advisory locks of files (flock), which belong to an open file: whoever dies gives them up, and threads of one process exclude
each other as processes do. A claim is a favour, never a condition: where there are no locks, all compile as if each were alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator

# Nothing takes so long to compile: a process that holds a claim for longer has been stopped, or hangs.
_LONGEST_CLAIM_S = 15 * 60.0


@contextlib.contextmanager
def claim(path: pathlib.Path) -> Iterator[bool]:
    """Holds the lock file `path`, which it makes, and removes in the end. False: another holds it. Never waits.

    True as well where it cannot be held: the folder can only be read, or its file system has no locks.
    """
    descriptor, is_free = None, True
    try:
        descriptor = _held(path)
    except BlockingIOError:
        is_free = time.time() - _time_of(path) > _LONGEST_CLAIM_S
    except OSError:
        pass
    try:
        yield is_free
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # before it is free: who opens it from now on makes another one
            os.close(descriptor)


def remove_unclaimed(folder: pathlib.Path, pattern: str) -> None:
    """Lock files of processes that were killed."""
    for path in folder.glob(pattern):
        with claim(path):
            pass


def _held(path: pathlib.Path) -> int:
    """A descriptor of the locked file. BlockingIOError if it is another's."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                os.utime(descriptor)  # since when it is held
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it after it was opened here


def _is_at(path: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _time_of(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was given up just now
        return time.time()
