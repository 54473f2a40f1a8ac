"""Devices that are not there: topologies that JAX's compilers accept in place of real ones.

The GPU compiler needs jax[cuda13] (Python 3.12 or newer), the TPU compiler libtpu; neither needs the hardware.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import importlib.util
import math
import os
from typing import Any

from jaxserve.aot.chips import CHIPS, GPUS_PER_HOST, H200, TPU7X, V5E, V5P, V6E, ChipSpec
from jaxserve.executor.mesh import Sizes

# GPU name -> XLA's target description beside this file.
GPU_TARGETS = {"h200": "h200.txtpb"}
_GPU_SHAPES = ((1,), (2,), (4,), (GPUS_PER_HOST,), (2, GPUS_PER_HOST))  # of one host; hosts, and of each
# Slices that can be rented (docs.cloud.google.com/tpu/docs, "supported configurations"), without the largest.
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBIC = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4))
_TPU_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {V5E.name: _FLAT, V6E.name: _FLAT, V5P.name: _CUBIC, TPU7X.name: _CUBIC}
_HOST_CHIPS = 4  # of a slice of several hosts; one host alone holds up to 8 chips of v5e or v6e

# What libtpu asks its surroundings for where there is no TPU; without the answers it waits or prints warnings.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing here touches a TPU, so several processes may do it at once
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A slice or a host to compile for."""

    chip: ChipSpec
    shape: tuple[int, ...]  # chips along each axis of the torus; of GPUs, how many there are, behind how many hosts

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        return 1 if _one_host(self.chip, self.shape) else self.num_chips // _host_chips(self.chip)

    def check(self, pp_size: int, tp_size: int) -> None:
        """ValueError, with the options, if they need more devices."""
        sizes = Sizes(pp_size, tp_size, 1)
        if sizes.per_replica > self.num_devices:
            raise ValueError(sizes.too_few(f"{self.name} has {self.num_devices}"))

    def devices(self) -> tuple[Any, ...]:
        """All of them. RuntimeError with a sentence if the compiler is not installed, or knows no such slice."""
        if self.chip.platform == "gpu":
            return gpu_devices(self.chip.name, self.num_devices // self.num_hosts, self.num_hosts)
        return _tpu_devices(self)


def known_targets() -> tuple[Target, ...]:
    """Chip by chip, each from its smallest slice to its largest."""
    slices = [Target(CHIPS[name], shape) for name, shapes in _TPU_SHAPES.items() for shape in shapes]
    return (*slices, *(Target(CHIPS[name], shape) for name in GPU_TARGETS for shape in _GPU_SHAPES))


def parse_target(text: str) -> Target:
    """`v6e:2x4`, `tpu7x:2x2x1`, `h200`, `h200:8`, `h200:2x8`. ValueError that lists the known ones."""
    known = {target.name: target for target in known_targets()}
    found = known.get(text.strip().lower()) or known.get(f"{text.strip().lower()}:1")
    if found is None:
        by_chip = [" ".join(target.name for target in known.values() if target.chip is chip) for chip in CHIPS.values()]
        raise ValueError(f"--topology {text!r} is not known. Known are: {'; '.join(by_chip)}.")
    return found


def links_per_chip(target: Target, num_devices: int) -> int:
    """Links that each of the first `num_devices` has to the others, of the chip that has the fewest: a corner's, where axes do
    not close into rings. A GPU has one, to the switch.
    """
    chip, num_chips = target.chip, -(-num_devices // target.chip.devices_per_chip)
    if chip.platform == "gpu":
        return 1
    if num_chips < target.num_chips:  # part of a slice: a compact block, of which a corner is counted
        return min(num_chips - 1, 2)
    return sum(0 if size == 1 else 2 if size % chip.wrapped_axis == 0 else 1 for size in target.shape)


def without_devices() -> None:
    """Tells JAX, before its first use, to leave the machine's own accelerators alone and to compile only.

    Compiled programs are not read from JAX's persistent cache: it can load none without the device they are for.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)


@functools.cache
def gpu_devices(name: str = "h200", count: int = 1, num_hosts: int = 1) -> tuple[Any, ...]:
    """`count` devices of each host. Raises ValueError for an unknown name, RuntimeError if the CUDA plugin is missing."""
    if name not in GPU_TARGETS:
        raise ValueError(f"GPU must be one of {', '.join(GPU_TARGETS)}; got {name!r}.")
    if importlib.util.find_spec("jax_cuda13_plugin") is None and importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise RuntimeError(
            f"Compiling for {name} needs JAX's CUDA plugin (no GPU): pip install 'jax[cuda13]' (Python 3.12 or newer)."
        )
    from jax.experimental import topologies

    target = importlib.resources.files("jaxserve.aot").joinpath(GPU_TARGETS[name]).read_text()
    shape = f"1x{num_hosts}x{count}"
    topology = topologies.get_topology_desc(platform="cuda", topology_name=name, target_config=target, topology=shape)
    return tuple(topology.devices)


@functools.cache
def _tpu_devices(target: Target) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(f"Compiling for {target.name} needs libtpu (no TPU): pip install 'jax[tpu]'.")
    for name, value in _LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    bounds = target.shape if _one_host(target.chip, target.shape) else (2, 2)
    bounds = (*bounds, 1, 1)[:3]
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target.name, chips_per_host_bounds=bounds)
    except RuntimeError as error:
        raise RuntimeError(f"libtpu does not know {target.name}: {str(error).splitlines()[0]}") from error
    return tuple(topology.devices)


def _one_host(chip: ChipSpec, shape: tuple[int, ...]) -> bool:
    most = 8 if chip in (V5E, V6E, H200) else _HOST_CHIPS
    return math.prod(shape) <= most


def _host_chips(chip: ChipSpec) -> int:
    """Of one of several hosts."""
    return GPUS_PER_HOST if chip.platform == "gpu" else _HOST_CHIPS
