"""Cases that run as another program: one under a profiler or a sanitizer, or a server's client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.device.case import NotHereError, Setting
from benchmarks.device.machine import cuda_tool


def tool(name: str, setting: Setting) -> str:
    """Path of one of CUDA's tools."""
    setting.needs_cuda()
    path = shutil.which(name) or cuda_tool(name)
    if path is None:
        raise NotHereError(f"{name} is not installed")
    return path


def probe(section: str, case: str, *, smoke: bool = False) -> list[str]:
    """The command that runs one case alone."""
    command = [sys.executable, "-m", "benchmarks.device.probe", section, case]
    return [*command, "--smoke"] if smoke else command


def run(command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output. It is in the worker's process group, so it ends with it."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    print(done.stdout, flush=True)  # into the log
    return done.returncode, done.stdout
