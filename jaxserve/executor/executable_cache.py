"""ExecutableCache: compiled programs in files, for starts that neither trace nor lower.

A program is found under two keys, both with versions, flags and devices. The first is this package's source and a description
of the program: all that decides what it would be lowered to, without lowering it, which is half of a warm start. The second
is what it was lowered to: after an edit of the source, most programs are the same.

The devices may be elsewhere (`jaxserve compile --topology --cache-dir`): their programs can be stored, but not loaded here.

An entry is code: whoever can write into the folder can run anything in this process, as with JAX's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import pickle
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from jax.experimental import serialize_executable
from jax.sharding import Mesh

import jaxserve
from jaxserve.executor.compile_counter import jax_cache_reads
from jaxserve.executor.environment import environment
from jaxserve.executor.mesh import is_elsewhere
from jaxserve.executor.program_lock import claim, remove_unclaimed

logger = logging.getLogger(__name__)

# What is kept of entries that nobody has asked for; the eldest go first. The demo model has 18 MB.
MAX_BYTES = 4 * 2**30

# All that an entry can depend on: what the executor may import (tests/test_imports.py).
_SOURCES = ("executor", "kernels", "models", "config", "runner.py", "types.py")
_MAGIC = b"jaxserve executable 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


class ExecutableCache:
    def __init__(self, folder: pathlib.Path, mesh: Mesh, description: str) -> None:
        """`description`: all that shapes the programs of one server, beside their own names."""
        self._folder = folder
        self._devices = tuple(mesh.devices.flat)
        self._is_elsewhere = is_elsewhere(mesh)
        self._environment = environment(mesh)
        self._identity = f"{source_digest()}\n{description}"
        self._has_failed = False

    def load(self, name: str) -> Any | None:
        """The compiled program, or None. An entry that cannot be read is as good as none.

        Of a device that is elsewhere it is the serialized program: what matters then is that it is there.
        """
        return self._read(name, self._path(name, self._identity))

    def find(self, name: str, lowered: str) -> Any | None:
        """The program that the same `lowered` text was compiled to, from now on under its name, too; or None."""
        path = self._path(name, lowered)
        program = self._read(name, path)
        if program is not None:
            self._link(path, self._path(name, self._identity))
        return program

    def compile(self, name: str, lowered: str, compile_it: Callable[[], Any]) -> Any:
        """The program that `compile_it` returns, which is added; what JAX's own cache had stays there alone."""
        with jax_cache_reads() as reads:
            program = compile_it()
        return program if reads else self.add(name, lowered, program)

    def add(self, name: str, lowered: str, program: Any) -> Any:
        """Under both keys; returns the program. Never fails: without an entry the next start takes longer, that is all."""
        path = self._path(name, lowered)
        try:
            payload = pickle.dumps(serialize_executable.serialize(program))
            self._write(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
            self._link(path, self._path(name, self._identity))
        except Exception as error:  # a full disk, or a backend that cannot
            level = logging.DEBUG if self._has_failed else logging.WARNING
            self._has_failed = True
            logger.log(
                level,
                "The program %s is not cached, nor may others be; the next start compiles them again: %s. "
                "--compilation-cache-dir names another folder.",
                name,
                _line(error),
            )
        return program

    def claim(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """While it is held and True, no other process or thread compiles the program `name`. False: another does."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        return claim(self._folder / f".{self._path(name, self._identity).stem}.lock")

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        """Whole or not at all, also if several servers start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
            try:
                file.write(data)
                file.flush()
            except OSError:
                os.unlink(file.name)
                raise
        os.replace(file.name, path)

    def _read(self, name: str, path: pathlib.Path) -> Any | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("The cached program %s cannot be read (%s); compiling it.", path, error.strerror)
            return None
        try:
            program = self._unpack(data)
        except Exception as error:  # of any kind: what is inside was written by another library
            logger.warning("The cached program %s is of no use (%s); compiling %s again.", path, _line(error), name)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was asked for
        return program

    def _link(self, path: pathlib.Path, name: pathlib.Path) -> None:
        """One file under two names."""
        with contextlib.suppress(OSError):
            temporary = path.with_name(f".{os.getpid()}-{threading.get_ident()}")
            os.link(path, temporary)
            os.replace(temporary, name)

    def prune(self, max_bytes: int = MAX_BYTES) -> None:
        """Removes what was asked for longest ago, and claims of processes that are gone."""
        remove_unclaimed(self._folder, ".*.lock")
        with contextlib.suppress(OSError):  # another server prunes as well
            names: dict[int, list[pathlib.Path]] = {}  # by the file they are names of
            for path in self._folder.glob("*.program"):
                names.setdefault(path.stat().st_ino, []).append(path)
            stats = sorted(((paths[0].stat(), paths) for paths in names.values()), key=lambda entry: entry[0].st_mtime)
            excess = sum(stat.st_size for stat, _ in stats) - max_bytes
            for stat, paths in stats:
                if excess <= 0:
                    break
                for path in paths:
                    path.unlink()
                excess -= stat.st_size

    def _path(self, name: str, key: str) -> pathlib.Path:
        digest = hashlib.sha256(f"{self._environment}\n{key}\n{name}".encode()).hexdigest()
        return self._folder / f"{name.replace(' ', '-')}-{digest[:32]}.program"

    def _unpack(self, data: bytes) -> Any:
        head = len(_MAGIC) + _DIGEST_BYTES
        payload = data[head:]
        if not data.startswith(_MAGIC) or data[len(_MAGIC) : head] != hashlib.sha256(payload).digest():
            raise ValueError("it is damaged")
        if self._is_elsewhere:
            return payload
        serialized, in_tree, out_tree = pickle.loads(payload)
        client = self._devices[0].client
        return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, client, self._devices)


@functools.cache
def source_digest(*more: str) -> str:
    """Of the files that programs can depend on, and `more` of this package."""
    root = pathlib.Path(jaxserve.__file__).parent
    digest = hashlib.sha256()
    for part in (*_SOURCES, *more):
        path = root / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
