"""`jaxserve bench kernels`: times the attention kernels on this machine's GPU or TPU, and tries which config is fastest.

A shape is tuned over a few typical steps at once; the config with the least time in all of them, each relative to the kernel's
default, wins. Shapes in which nothing beats the default by more than noise keep it. The table that comes out is what
`jaxserve.kernels.tuning` reads. What kernels there are and which configs are tried is the platform's, in gpu.py and tpu.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import jax

from jaxserve.bench.gpu import GpuKernels
from jaxserve.bench.inputs import AttentionCase
from jaxserve.bench.shapes import Shape
from jaxserve.bench.tpu import TpuKernels
from jaxserve.kernels.spec import Chip

# A config must be so much faster than the default to be written down: two runs of one config differ by about a percent.
LEAST_GAIN = 0.02


class Kernels(Protocol):
    """One platform's. Configs are frozen dataclasses."""

    default_page_size: ClassVar[int]
    dtypes: ClassVar[tuple[str, ...]]  # as shapes.Device has it

    @property
    def chip(self) -> Chip: ...

    def unsupported(self, shape: Shape) -> str | None:
        """Why the kernels cannot run with it here, or None."""
        ...

    def default_config(self, op: str, shape: Shape) -> Any:
        """What a server would use: the kernel's own, or what a table already says."""
        ...

    def tunable(self, op: str) -> tuple[str, ...]:
        """Fields of a config that stand in a table."""
        ...

    def others(self, op: str, shape: Shape, default: Any) -> Iterator[Any]:
        """The configs to try beside the default. Some may fail: those drop out."""
        ...

    def time_case(self, op: str, case: AttentionCase, config: Any) -> float:
        """Microseconds."""
        ...


@dataclasses.dataclass(frozen=True)
class Measured:
    op: str
    key: str  # Shape.key
    changes: Mapping[str, Any]  # what differs from the default
    us: tuple[float, ...]  # per step; () where it failed
    reason: str = ""  # why it failed
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # all that a table would say


def kernels_here() -> Kernels:
    """Those of this process's first device. ValueError with a sentence if there are none for it."""
    chip = Chip.of(jax.devices()[0])
    known: dict[str, type[GpuKernels | TpuKernels]] = {"gpu": GpuKernels, "tpu": TpuKernels}
    if chip.platform not in known:
        raise ValueError(f"they are for NVIDIA GPUs and for TPUs, and JAX finds a {chip.platform} here.")
    return known[chip.platform](chip)


def measure(kernels: Kernels, shapes: Iterable[Shape], *, tune: bool) -> Iterator[Measured]:
    """The default of each op and shape, and with `tune` all that is tried beside it, one after the other."""
    for shape in shapes:
        reason = kernels.unsupported(shape)
        for op, steps in shape.steps().items():
            if reason is not None:
                yield Measured(op, shape.key(op), {}, (), reason)
                continue
            default = kernels.default_config(op, shape)
            for config in (default, *(kernels.others(op, shape, default) if tune else ())):
                yield _measure(kernels, op, shape.key(op), steps, default, config)


def _measure(kernels: Kernels, op: str, key: str, steps: list[AttentionCase], default: Any, config: Any) -> Measured:
    fields = {name: getattr(config, name) for name in kernels.tunable(op)}
    changes = {name: value for name, value in fields.items() if value != getattr(default, name)}
    try:
        return Measured(op, key, changes, tuple(kernels.time_case(op, step, config) for step in steps), fields=fields)
    except Exception as error:  # a config may not fit in any way a compiler knows
        return Measured(op, key, changes, (), f"{type(error).__name__}: {str(error).strip()[:200]}")


def best_table(device_kind: str, measured: Iterable[Measured]) -> dict[str, dict[str, dict[str, Any]]]:
    """The tuning table: the fastest config per key, where it beats the default clearly."""
    by_key: dict[str, list[Measured]] = {}
    for one in _over_windows(measured):
        by_key.setdefault(one.key, []).append(one)
    shapes = {}
    for key, found in by_key.items():
        default = next((one for one in found if not one.changes), None)
        base = default or found[0]
        best = min(found, key=lambda one: (relative_time(one, base), len(one.changes)))
        if best.changes and (default is None or relative_time(best, default) < 1 - LEAST_GAIN):
            shapes[key] = dict(best.fields)
    return {device_kind: shapes}


def _over_windows(measured: Iterable[Measured]) -> Iterator[Measured]:
    """Layers that differ in their sliding window share a key: a config's times in all of them are one. What fails in one of
    them is left out."""
    same: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        same.setdefault((one.key, repr(sorted(one.changes.items()))), []).append(one)
    for found in same.values():
        if all(one.us for one in found):
            yield dataclasses.replace(found[0], us=sum((one.us for one in found), ()))


def relative_time(one: Measured, default: Measured) -> float:
    """Geometric mean over the steps: a step's length does not decide how much it counts."""
    ratios = [us / base for us, base in zip(one.us, default.us, strict=True)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
