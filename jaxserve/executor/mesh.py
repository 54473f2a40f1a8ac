"""The device mesh. There always is one, also of a single device: axes ("data", "tensor")."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.models import TENSOR_AXIS

# What brings JAX to a platform that it knows nothing of.
_EXTRAS = {"cuda": "pip install 'jaxserve[cuda]'", "tpu": "pip install 'jaxserve[tpu]'"}
# Of a GPU's memory, what JAX takes at its start (alone it would take three quarters); the rest is CUDA's and the libraries'.
GPU_MEMORY_SHARE = 0.95
_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # today's name and the one before it


def select_devices(device: str, tp_size: int) -> None:
    """Tells JAX, before its first use in this process, which platform to start and how many CPU devices to pretend."""
    if device != "auto":
        jax.config.update("jax_platforms", {"cpu": "cpu", "cuda": "cuda", "tpu": "tpu"}[device])
    if tp_size > 1:
        jax.config.update("jax_num_cpu_devices", tp_size)
    if not any(name in os.environ for name in _SHARE_VARIABLES):
        os.environ[_SHARE_VARIABLES[0]] = str(GPU_MEMORY_SHARE)


def make_mesh(tp_size: int, devices: list[jax.Device] | None = None) -> Mesh:
    """A (1, tp_size) mesh over the first devices. ValueError if there are too few, or none of the platform that was selected.

    In JAX's order: XLA lays its rings by the devices' coordinates, whatever the mesh's order (tests/accelerator compare them).
    """
    devices = _find_devices() if devices is None else devices
    if len(devices) < tp_size:
        raise ValueError(f"--tp-size {tp_size} needs as many devices; {devices[0].platform} has {len(devices)}.")
    return Mesh(np.asarray(devices[:tp_size]).reshape(1, tp_size), ("data", TENSOR_AXIS))


def _find_devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, where no NVIDIA GPU is visible
        wanted = str(jax.config.values["jax_platforms"])
        reason = str(error).removesuffix(" (set JAX_PLATFORMS='' to automatically choose an available backend)").rstrip(".")
        needs = f" What it needs there: {_EXTRAS[wanted]}." if wanted in _EXTRAS else ""
        raise ValueError(
            f"--device {wanted} (or JAX_PLATFORMS): JAX finds no such device, but {_whatever_there_is()}. "
            f"{reason or 'No NVIDIA GPU is visible'}.{needs} `jaxserve check-env` shows what is installed."
        ) from error


def _whatever_there_is() -> str:
    jax.config.update("jax_platforms", None)
    found = jax.devices()
    return f"{len(found)} x {found[0].device_kind}"


def platform_of(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def is_elsewhere(mesh: Mesh) -> bool:
    """Its devices are those of a topology, which can be compiled for and nothing else."""
    return bool(mesh.devices.flat[0].client.runtime_type == "compile_only_runtime")
