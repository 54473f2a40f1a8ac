"""The compiled paged_attention.cc: built once per machine with the C++ compiler that is there, and registered with XLA.

It is compiled for the processor it runs on, in a few seconds, and kept beside JAX's compiled programs. A machine without a
compiler has no library, and says why; callers then do without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import jax
import jaxlib

from jaxserve.kernels.machine import processor, user_cache

_SOURCE = pathlib.Path(__file__).with_name("paged_attention.cc")
_SYMBOL = "JaxservePagedAttention"
COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
_TIMEOUT_S = 300


class NoLibraryError(Exception):
    """Why there is none, as a sentence."""


def target_name() -> str:
    """The custom call's name, registered with XLA. Raises NoLibraryError."""
    if isinstance(found := _registered(), NoLibraryError):
        raise found
    return found


@functools.cache
def _registered() -> str | NoLibraryError:
    try:
        path = _library(_compiler(), user_cache() / "native")
        function = getattr(ctypes.CDLL(str(path)), _SYMBOL)
    except NoLibraryError as error:
        return error
    except (OSError, subprocess.SubprocessError) as error:
        return NoLibraryError(f"its C++ part cannot be built or loaded: {error}.")
    # The source is in the name and the compiler is not: a cached program finds its target after the compiler was replaced.
    name = f"jaxserve_paged_attention_{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoLibraryError(f"no C++ compiler is installed ({wanted or ', '.join(COMPILERS)}).")


def _library(compiler: str, folder: pathlib.Path) -> pathlib.Path:
    """The shared object in `folder`, compiled if it is not there."""
    path = folder / f"paged_attention_{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once; each moves a whole file into place.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        output = pathlib.Path(made) / path.name
        command = [compiler, *_FLAGS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode:
            line = next((line for line in result.stderr.splitlines() if "error" in line), "without a message")
            raise NoLibraryError(f"{compiler} cannot compile its C++ part: {line}.")
        output.replace(path)
    return path


def _fingerprint(compiler: str) -> str:
    """Of everything that the shared object depends on; a home folder may be shared by machines with other processors."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=_TIMEOUT_S).stdout
    parts = (_SOURCE.read_bytes(), version, " ".join(_FLAGS).encode(), jaxlib.__version__.encode(), processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
