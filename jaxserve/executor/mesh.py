"""The device mesh. There always is one, also of a single device: axes ("data", "tensor")."""

from __future__ import annotations

import collections
import glob
import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.models import ALL_AXES

# What brings JAX to a platform that it knows nothing of.
_EXTRAS = {"cuda": "pip install 'jaxserve[cuda]'", "tpu": "pip install 'jaxserve[tpu]'"}
# Of a GPU's memory, what JAX takes at its start (alone it would take three quarters); the rest is CUDA's and the libraries'.
GPU_MEMORY_SHARE = 0.95
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # today's name and the one before it


# What options call a platform -> what JAX calls it.
_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


def select_devices(device: str, num_devices: int) -> None:
    """Tells JAX, before its first use in this process, which platform to start and how many CPU devices to pretend."""
    if device != "auto":
        jax.config.update("jax_platforms", {"cpu": "cpu", "cuda": "cuda", "tpu": "tpu"}[device])
    if num_devices > 1:
        jax.config.update("jax_num_cpu_devices", num_devices)
    if not any(name in os.environ for name in _SHARE_VARIABLES):
        os.environ[_SHARE_VARIABLES[0]] = str(GPU_MEMORY_SHARE)


def check_given(devices: Sequence[jax.Device], sizes: Sizes, device: str) -> None:
    """ValueError unless these, which a program that runs here already has chosen, are as many as the sizes say, replicas
    included, of this process, and of the platform that the option `device` names."""
    for one in devices:
        if one.process_index != jax.process_index():
            raise ValueError(f"devices must be of this process ({jax.process_index()}); {one} is of {one.process_index}.")
        if one.platform != devices[0].platform:
            raise ValueError(f"devices must be of one platform; {devices[0]} and {one} were given.")
    count = sizes.dp_size * sizes.per_replica
    if len(devices) != count:
        larger = (f"{name} {size}" for name, size in sizes._asdict().items() if size > 1)
        wanted = " with ".join(larger) or "tp_size 1"
        needed = "1 device" if count == 1 else f"{count} devices"
        given = "1 was given" if len(devices) == 1 else f"{len(devices)} were given"
        raise ValueError(f"{wanted} needs {needed}; {given}.")
    twice = next((one for one, times in collections.Counter(devices).items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"devices must not be the same; {twice} was given twice.")
    if device != "auto" and _PLATFORMS[device] != devices[0].platform:
        raise ValueError(f"device must name the platform of the devices, {devices[0].platform}; got {device!r}.")


def make_mesh(tp_size: int, devices: Sequence[jax.Device] | None = None, *, attn_dp_size: int = 1, dp_size: int = 1) -> Mesh:
    """An (attn_dp_size, tp_size / attn_dp_size) mesh over the first devices, as `make_meshes` makes them."""
    (mesh,) = make_meshes(1, tp_size, devices, attn_dp_size=attn_dp_size, dp_size=dp_size)
    return mesh


def make_meshes(
    pp_size: int, tp_size: int, devices: Sequence[jax.Device] | None = None, *, attn_dp_size: int = 1, dp_size: int = 1
) -> tuple[Mesh, ...]:
    """Of each stage a mesh of its own, (attn_dp_size, tp_size / attn_dp_size), over the first devices. ValueError if there
    are too few, or none of the platform that was selected.

    In JAX's order: XLA lays its rings by the devices' coordinates, whatever the mesh's order (tests/accelerator compare them).
    `dp_size`: as many replicas were given devices of their own by variables of the environment, this process one part.
    """
    sizes = Sizes(pp_size, tp_size, dp_size)
    count = sizes.per_replica
    if devices is None:
        devices = _of_each_process(_find_devices(sizes), sizes)
    if len(devices) < count:
        raise ValueError(sizes.too_few(f"{devices[0].platform} has {len(devices)}"))
    by_stage = np.asarray(devices[:count]).reshape(pp_size, attn_dp_size, -1)
    return tuple(Mesh(of_stage, ALL_AXES) for of_stage in by_stage)


class Sizes(NamedTuple):
    """Of what devices are divided into."""

    pp_size: int
    tp_size: int
    dp_size: int

    @property
    def per_replica(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def options(self) -> str:
        """Of each replica."""
        return f"--tp-size {self.tp_size}" if self.pp_size == 1 else f"--pp-size {self.pp_size} and --tp-size {self.tp_size}"

    def too_few(self, found: str) -> str:
        """A sentence. CUDA leaves out what a list names and is not there, and all that follows."""
        if self.dp_size == 1 and self.pp_size == 1:
            return f"--tp-size {self.tp_size} needs as many devices; {found}."
        if self.dp_size == 1:
            return f"--pp-size {self.pp_size} with --tp-size {self.tp_size} needs {self.per_replica} devices; {found}."
        cuda = os.environ.get("CUDA_VISIBLE_DEVICES")
        part = f" (CUDA_VISIBLE_DEVICES={cuda})" if cuda else ""
        return (
            f"--dp-size {self.dp_size} with {self.options} needs {self.dp_size * self.per_replica} devices, {self.per_replica} "
            f"for each replica; of this one's{part}: {found}."
        )


def _of_each_process(devices: list[jax.Device], sizes: Sizes) -> list[jax.Device]:
    """As many of each process as of the others, in JAX's order; of one process all. ValueError if one has too few."""
    found = collections.Counter(device.process_index for device in devices)
    if len(found) == 1:
        return devices
    share, fewest = sizes.per_replica // len(found), min(found.values())
    if fewest < share:
        raise ValueError(f"{sizes.options} over {len(found)} hosts needs {share} devices of each; one has {fewest}.")
    taken: collections.Counter[int] = collections.Counter()
    chosen = []
    for device in devices:
        taken[device.process_index] += 1
        if taken[device.process_index] <= share:
            chosen.append(device)
    return chosen


def _find_devices(sizes: Sizes) -> list[jax.Device]:
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, where no NVIDIA GPU is visible
        wanted = str(jax.config.values["jax_platforms"] or "auto")
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].partition(" (you may need to uninstall")[0].rstrip(".")
        needs = f" What it needs there: {_EXTRAS[wanted]}." if wanted in _EXTRAS else ""
        share = "" if sizes.dp_size == 1 else f" {sizes.too_few('it may be that this machine has fewer')}"
        raise ValueError(
            f"--device {wanted} (or JAX_PLATFORMS): JAX finds no such device, but {_whatever_there_is()}. "
            f"{reason or 'No NVIDIA GPU is visible'}.{needs}{share} `jaxserve check-env` shows what is installed."
        ) from error
    if sizes.dp_size > 1 and devices[0].platform == "cpu" and _has_lost_gpus():
        raise ValueError(sizes.too_few("none of them is there"))
    return devices


def _has_lost_gpus() -> bool:
    """JAX was to choose, could use this machine's GPUs, and computes on CPU: those that it was told of do not exist."""
    could = any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS) and bool(glob.glob("/dev/nvidia[0-9]*"))
    return could and not jax.config.values["jax_platforms"] and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _whatever_there_is() -> str:
    for platforms in (None, "cpu"):  # with None, a GPU that fails to start is an error again
        jax.config.update("jax_platforms", platforms)
        try:
            found = jax.devices()
        except RuntimeError:
            continue
        return f"{len(found)} x {found[0].device_kind}"
    return "none at all"


def platform_of(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def spans_processes(mesh: Mesh) -> bool:
    """Of this JAX; devices that are elsewhere belong to none."""
    return not is_elsewhere(mesh) and mesh.is_multi_process


def processes_of(mesh: Mesh) -> frozenset[int]:
    """That have its devices."""
    return frozenset(device.process_index for device in mesh.devices.flat)


def is_here(mesh: Mesh) -> bool:
    """This process has some of its devices."""
    return jax.process_index() in processes_of(mesh)


def is_elsewhere(mesh: Mesh) -> bool:
    """Its devices are those of a topology, which can be compiled for and nothing else."""
    return bool(mesh.devices.flat[0].client.runtime_type == "compile_only_runtime")
