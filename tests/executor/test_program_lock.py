"""Claims of processes and threads on one program."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxserve.executor import program_lock
from jaxserve.executor.program_lock import claim, remove_unclaimed

_HOLD = """
import pathlib, sys
from jaxserve.executor.program_lock import claim
with claim(pathlib.Path(sys.argv[1])) as is_free:
    print(is_free, flush=True)
    sys.stdin.read()
"""


def test_one_holds_it_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / ".program.lock"
    with claim(path) as first, claim(path) as second:
        assert (first, second) == (True, False)
    with claim(path) as again:
        assert again
    with pytest.raises(RuntimeError), claim(path):
        raise RuntimeError("it does not compile")
    assert not list(tmp_path.iterdir())


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / ".program.lock"
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"True\n"
        with claim(path) as is_free:
            assert not is_free
        remove_unclaimed(tmp_path, ".*.lock")
        assert path.exists()
        holder.kill()
        holder.wait()
    assert path.exists(), "it could not remove it"
    with claim(path) as is_free:
        assert is_free
    assert not path.exists()
    path.touch()
    remove_unclaimed(tmp_path, ".*.lock")
    assert not path.exists()


def test_whoever_waits_never_holds_a_file_that_was_removed(tmp_path: Path) -> None:
    """Many threads take it in turn, each removing it: never two at once."""
    path, inside, most, times = tmp_path / ".program.lock", 0, 0, 0
    counting = threading.Lock()

    def work() -> None:
        nonlocal inside, most, times
        while times < 300:
            with claim(path) as is_free:
                if not is_free:
                    continue
                with counting:
                    inside, times = inside + 1, times + 1
                    most = max(most, inside)
                with counting:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside) == (1, 0) and times >= 300
    assert not path.exists()


def test_where_there_are_no_locks_everybody_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(tmp_path / "missing" / ".program.lock") as is_free:
        assert is_free

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(tmp_path / ".program.lock") as first, claim(tmp_path / ".program.lock") as second:
        assert first and second


def test_a_claim_that_is_held_too_long_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".program.lock"
    with claim(path), monkeypatch.context() as patch:
        patch.setattr(program_lock, "_LONGEST_CLAIM_S", -1.0)
        with claim(path) as is_free:
            assert is_free
        assert path.exists(), "still its holder's"
