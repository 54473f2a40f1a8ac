"""The machine this runs on: what its processor is and can do, and where a user's caches lie."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform


def user_cache() -> pathlib.Path:
    """jaxserve's folder in $XDG_CACHE_HOME; it need not exist. OSError with a sentence for a user without a home."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(folder) / "jaxserve"
    try:
        return pathlib.Path.home() / ".cache" / "jaxserve"
    except RuntimeError as error:
        raise OSError("This user has no home folder for caches; set XDG_CACHE_HOME.") from error


@functools.cache
def processor() -> str:
    """What machine code is compiled for: the kind of machine, the processor and, where Linux says it, what that can do."""
    with contextlib.suppress(OSError):
        first = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        told = [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return "\n".join((platform.machine(), *told))
    return f"{platform.machine()} {platform.processor()}"
