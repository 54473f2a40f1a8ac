"""The machine a run is on: its GPU, versions, ptxas, clocks; and wheels of packages that it lacks. Nothing here imports JAX."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.device.events import EventLog
from jaxserve.cuda_toolkit import toolkit_candidates

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "flashinfer-python", "vllm", "nvidia-cudnn-cu13")
HOPPER = "9.0"  # compute capability
_IDENTITY = ("name", "driver_version", "memory.total", "compute_cap", "power.limit", "clocks.max.sm", "clocks.max.memory")
_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_STATE_EVERY_S = 5.0


class UnfitMachineError(Exception):
    """A sentence for the one who asked."""


def command(*words: str) -> str | None:
    """Its output; None if there is no such command or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _query(fields: tuple[str, ...]) -> dict[str, str] | None:
    text = command("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return dict(zip(fields, text.splitlines()[0].split(", "), strict=False)) if text else None


def gpu() -> dict[str, str]:
    """The first GPU. UnfitMachineError if there is none, or one that our kernels are not for."""
    found = _query(_IDENTITY)
    if found is None:
        raise UnfitMachineError("this needs an NVIDIA Hopper GPU, and nvidia-smi finds none; --smoke runs without")
    if found["compute_cap"] != HOPPER:
        raise UnfitMachineError(
            f"this needs an NVIDIA Hopper GPU (compute capability {HOPPER}), "
            f"and this is an {found['name']} ({found['compute_cap']}); --smoke runs without"
        )
    return found


def facts(commit: str | None) -> dict[str, Any]:
    """What a result must say about where it was measured, the GPU aside."""
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "versions": dict(_versions()),
        "ptxas": _ptxas(),
        "CUDA_ROOT": os.environ.get("CUDA_ROOT"),
        "commit": commit or command("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "absent"


def _ptxas() -> dict[str, str]:
    """Path -> version, in the order in which it is looked for."""
    paths = [root / "bin" / "ptxas" for root in toolkit_candidates()]
    versions = {str(path): command(str(path), "--version") for path in dict.fromkeys(paths) if path.exists()}
    return {
        path: next((line for line in text.splitlines() if "release" in line), text) for path, text in versions.items() if text
    }


@contextmanager
def watched_gpu(log: EventLog) -> Iterator[None]:
    """Records clocks and power meanwhile."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_STATE_EVERY_S):
            state = _query(_STATE)
            if state is not None:
                log.emit("gpu", **state)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def worker_environment(wheels: Path, smoke: bool) -> Iterator[dict[str, str]]:
    """What workers need in theirs: this repository and the wheels on their path, and JAX told how to run.

    JAX and torch share the device, so JAX takes memory as it needs it.
    """
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if smoke:  # its time is XLA's, compiling what runs once
        variables["JAX_PLATFORMS"] = "cpu"
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    with tempfile.TemporaryDirectory(prefix="device-site-") as folder:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if list(wheels.glob("*.whl")):
            install(wheels, folder)
            paths.insert(0, folder)
        yield {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def install(wheels: Path, folder: str) -> None:
    """Unpacks the wheels and asks no registry. UnfitMachineError with pip's last line if they are not for this Python."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", folder]
    done = subprocess.run(
        [*pip, *options, *map(str, sorted(wheels.glob("*.whl")))], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UnfitMachineError(f"the wheels in {wheels} cannot be installed: {last}")


def cuda_tool(name: str) -> str | None:
    """Path of a tool of the CUDA toolkit."""
    beside = (str(root / "bin" / name) for root in toolkit_candidates())
    return next((path for path in beside if os.access(path, os.X_OK)), None)
