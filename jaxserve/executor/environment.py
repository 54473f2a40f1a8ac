"""What compiled programs depend on beside the code, the model and the options: versions, flags, devices.

All of it can be said of devices that are elsewhere, too, so that what was compiled for them here is found there. Where
anything differs, nothing is found.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from jaxserve.executor.mesh import platform_of
from jaxserve.kernels.machine import processor
from jaxserve.kernels.tuning import TUNING_FILE_VARIABLE

# Of what the environment says to JAX and XLA.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Options of JAX that say where something is or is written, not what is compiled.
_IRRELEVANT_OPTIONS = ("address", "cache", "platforms", "log", "dump")
# XLA for GPUs. The CUDA libraries beside it are chosen when a program runs.
_GPU_COMPILERS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")


def environment(mesh: Mesh) -> str:
    """In lines, for a key."""
    devices, client = list(mesh.devices.flat), mesh.devices.flat[0].client
    lines = {
        "python": sys.implementation.cache_tag,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "compiler": _compiler(client),
        "devices": [_identity(device) for device in devices],
        "mesh": (mesh.devices.shape, mesh.axis_names, client.device_count()),
        "host": processor() if platform_of(mesh) == "cpu" else platform.machine(),
        "variables": [(name, os.environ.get(name)) for name in _VARIABLES],
        "tuning": _tuning_file(),
        "options": [
            (name, repr(value))
            for name, value in sorted(jax.config.values.items())
            if not any(word in name for word in _IRRELEVANT_OPTIONS)
        ],
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _compiler(client: Any) -> str:
    """XLA's version. A client of GPUs names CUDA's, one of GPUs that are elsewhere not even that; the package has both. One of
    TPUs names libtpu's build, wherever they are."""
    packages = _versions(_GPU_COMPILERS) if client.platform == "gpu" else None
    return f"{client.platform} {packages or client.platform_version}"


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _identity(device: Any) -> tuple[Any, ...]:
    """On TPUs with the place on the torus, which a program with collectives is laid out for."""
    place = (tuple(device.coords), device.core_on_chip) if device.platform == "tpu" else ()
    return (device.id, device.device_kind, device.process_index, *place)


def _tuning_file() -> str:
    """Of the kernel configs a user brings; those that come with jaxserve are source."""
    path = os.environ.get(TUNING_FILE_VARIABLE)
    return "" if not path else hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
