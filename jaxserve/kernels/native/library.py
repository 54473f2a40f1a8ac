"""The custom calls in C++: built once per machine, as one library, with the compiler that is there, and registered with XLA.

It is compiled for the processor it runs on, in a few seconds, and kept beside JAX's compiled programs; where it cannot be kept,
each process compiles it for itself. A machine without a compiler has no library, and says why; callers then do without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import tempfile

import jax
import jaxlib

from jaxserve.kernels.machine import processor, user_cache

logger = logging.getLogger(__name__)

_FOLDER = pathlib.Path(__file__).parent
_SOURCES = (_FOLDER / "paged_attention.cc", _FOLDER / "few_rows.cc", _FOLDER / "low_rank.cc", _FOLDER / "zero_pages.cc")
_HEADERS = (_FOLDER / "cpu.h",)
# What the sources define.
PAGED_ATTENTION = "JaxservePagedAttention"
FEW_ROWS = "JaxserveFewRows"
LOW_RANK = "JaxserveLowRank"
ZERO_PAGES = "JaxserveZeroPages"
COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
_TIMEOUT_S = 300


class NoLibraryError(Exception):
    """Why there is none, as a sentence."""


def target_name(symbol: str) -> str:
    """The name under which XLA knows a custom call: all are registered now, if they were not. Raises NoLibraryError."""
    if isinstance(found := _registered(), NoLibraryError):
        raise found
    return found[symbol]


@functools.cache
def _registered() -> dict[str, str] | NoLibraryError:
    try:
        library = _load(_compiler())
    except NoLibraryError as error:
        return error
    except (OSError, subprocess.SubprocessError) as error:
        return NoLibraryError(f"its C++ part cannot be built or loaded: {error}.")
    # The sources are in the name and the compiler is not: a cached program finds its target after the compiler was replaced.
    version = hashlib.sha256(_source_text()).hexdigest()[:8]
    names = {symbol: f"{symbol}_{version}" for symbol in (PAGED_ATTENTION, FEW_ROWS, LOW_RANK, ZERO_PAGES)}
    for symbol, name in names.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return names


def _load(compiler: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_library(compiler, user_cache() / "native")))
    except (OSError, NoLibraryError) as error:  # a full disk looks like a compiler that fails
        problem = str(error)
    with tempfile.TemporaryDirectory(prefix="jaxserve-native-") as folder:  # it stays loaded when the file is gone
        library = ctypes.CDLL(str(_library(compiler, pathlib.Path(folder))))
    logger.warning(
        "The C++ part is compiled at every start, as it cannot be kept: %s. See XDG_CACHE_HOME.", problem.rstrip(".")
    )
    return library


def _source_text() -> bytes:
    return b"\0".join(path.read_bytes() for path in (*_SOURCES, *_HEADERS))


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoLibraryError(f"no C++ compiler is installed ({wanted or ', '.join(COMPILERS)}).")


def _library(compiler: str, folder: pathlib.Path) -> pathlib.Path:
    """The shared object in `folder`, compiled if it is not there."""
    path = folder / f"custom_calls_{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once; each moves a whole file into place.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        output = pathlib.Path(made) / path.name
        command = [compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", *map(str, _SOURCES), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode:
            line = next((line for line in result.stderr.splitlines() if "error" in line), "without a message")
            raise NoLibraryError(f"{compiler} cannot compile its C++ part: {line}.")
        output.replace(path)
    return path


def _fingerprint(compiler: str) -> str:
    """Of everything that the shared object depends on; a home folder may be shared by machines with other processors."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=_TIMEOUT_S).stdout
    parts = (_source_text(), version, " ".join(_FLAGS).encode(), jaxlib.__version__.encode(), processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
