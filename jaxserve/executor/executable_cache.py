"""ExecutableCache: compiled programs in files, for starts that neither trace nor lower.

JAX's own persistent cache is keyed by the lowered program, and lowering is half of a warm start. Here the key is all that
decides what would be lowered and how it would be compiled: this package's source, versions, flags, devices, and a description
of the program. Where any of it differs the entry is another one, or none; then JAX's cache is asked as before.

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
import platform
import sys
import tempfile
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import Mesh

import jaxserve
from jaxserve.executor.mesh import platform_of
from jaxserve.kernels.tuning import TUNING_FILE_VARIABLE

logger = logging.getLogger(__name__)

# What is kept of entries that nobody has asked for; the eldest go first. The demo model has 18 MB.
MAX_BYTES = 4 * 2**30

# All that an entry can depend on: what the executor may import (tests/test_imports.py).
_SOURCES = ("executor", "kernels", "models", "config.py", "runner.py", "types.py")
# Of what the environment says to JAX and XLA.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Options of JAX that say where something is or is written, not what is compiled.
_IRRELEVANT_OPTIONS = ("cache", "platforms", "log", "dump")
_MAGIC = b"jaxserve executable 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


class ExecutableCache:
    def __init__(self, folder: pathlib.Path, mesh: Mesh, description: str) -> None:
        """`description`: all that shapes the programs of one server, beside their own names."""
        self._folder = folder
        self._devices = tuple(mesh.devices.flat)
        self._identity = f"{environment(mesh)}\n{description}"

    def load(self, name: str) -> Any | None:
        """The compiled program, or None. An entry that cannot be read is as good as none."""
        path = self._path(name)
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

    def store(self, name: str, program: Any) -> None:
        """Never fails: without an entry the next start takes longer, and that is all."""
        path = self._path(name)
        try:
            payload = pickle.dumps(serialize_executable.serialize(program))
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
                file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, path)  # whole or not at all, also if several servers start
        except Exception as error:  # a full disk, or a backend that cannot
            logger.warning("The program %s is not cached: %s", name, _line(error))

    def prune(self, max_bytes: int = MAX_BYTES) -> None:
        """Removes what was asked for longest ago."""
        with contextlib.suppress(OSError):  # another server prunes as well
            entries = sorted((entry.stat().st_mtime, entry.stat().st_size, entry) for entry in self._folder.glob("*.program"))
            excess = sum(size for _, size, _ in entries) - max_bytes
            for _, size, entry in entries:
                if excess <= 0:
                    break
                entry.unlink()
                excess -= size

    def _path(self, name: str) -> pathlib.Path:
        digest = hashlib.sha256(f"{self._identity}\n{name}".encode()).hexdigest()
        return self._folder / f"{name.replace(' ', '-')}-{digest[:32]}.program"

    def _unpack(self, data: bytes) -> Any:
        head = len(_MAGIC) + _DIGEST_BYTES
        payload = data[head:]
        if not data.startswith(_MAGIC) or data[len(_MAGIC) : head] != hashlib.sha256(payload).digest():
            raise ValueError("it is damaged")
        serialized, in_tree, out_tree = pickle.loads(payload)
        client = self._devices[0].client
        return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, client, self._devices)


def environment(mesh: Mesh) -> str:
    """What programs depend on beside the model and the options: code, versions, flags, devices."""
    devices, client = list(mesh.devices.flat), mesh.devices.flat[0].client
    lines = {
        "source": source_digest(),
        "python": sys.version,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": f"{client.platform} {client.platform_version}",  # with the versions of CUDA or libtpu
        "devices": [(device.id, device.device_kind, device.process_index) for device in devices],
        "mesh": (mesh.devices.shape, mesh.axis_names, client.device_count()),
        "host": _host() if platform_of(mesh) == "cpu" else platform.machine(),
        "variables": [(name, os.environ.get(name)) for name in _VARIABLES],
        "tuning": _tuning_file(),
        "options": [
            (name, repr(value))
            for name, value in sorted(jax.config.values.items())
            if not any(word in name for word in _IRRELEVANT_OPTIONS)
        ],
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


@functools.cache
def source_digest() -> str:
    """Of the files that programs can depend on."""
    root = pathlib.Path(jaxserve.__file__).parent
    digest = hashlib.sha256()
    for part in _SOURCES:
        path = root / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _tuning_file() -> str:
    """Of the kernel configs a user brings; those that come with jaxserve are source."""
    path = os.environ.get(TUNING_FILE_VARIABLE)
    return "" if not path else hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


@functools.cache
def _host() -> str:
    """The processor that code was compiled for, and where Linux says it, what it can do."""
    with contextlib.suppress(OSError):
        for block in pathlib.Path("/proc/cpuinfo").read_text().split("\n\n"):
            lines = [line for line in block.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
            return "\n".join(lines)
    return f"{platform.machine()} {platform.processor()}"


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
