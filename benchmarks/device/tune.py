"""What `jaxserve bench kernels --tune` tries, a config a case, so that a run that ends early keeps what it measured. The report
writes the table of the best ones (tuning.json), which JAXSERVE_TUNING_FILE names to jaxserve."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from benchmarks.device.case import Case, Measure, Numbers, Setting
from benchmarks.device.machine import UnfitMachineError

_SHAPE = re.compile(r"(\d+)/(\d+),(\d+),(\d+),(\w+)")
DEFAULT_SHAPE = "32/8,128,64,bfloat16"


def read_shape(text: str) -> Any:
    """HEADS/KV_HEADS,HEAD_DIM,PAGE_SIZE,KV_DTYPE as a jaxserve.bench.shapes.Shape; ValueError."""
    from jaxserve.bench.shapes import Shape

    match = _SHAPE.fullmatch(text or DEFAULT_SHAPE)
    if match is None:
        raise ValueError("it must read HEADS/KV_HEADS,HEAD_DIM,PAGE_SIZE,KV_DTYPE")
    heads, kv_heads, head_dim, page_size = map(int, match.groups()[:4])
    return Shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, kv_dtype=match[5])


def check_shape(text: str) -> None:
    """UnfitMachineError with the kernels' reason if no kernel takes it."""
    from jaxserve.bench.gpu import GpuKernels
    from jaxserve.kernels.spec import Chip

    try:
        reason = GpuKernels(Chip("gpu", "NVIDIA H200", (9, 0), 132)).unsupported(read_shape(text))
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        raise UnfitMachineError(f"--shape {text}: {reason}")


def time_config(op: str, shape: Any, config: Any, default: Any, setting: Setting) -> Measure:
    import jax

    from jaxserve.bench.attention import compile_attention
    from jaxserve.bench.gpu import GRIDS
    from jaxserve.bench.timing import Plan

    steps = [compile_attention(op, step, config, Plan(repeats=5), setting.interpret) for step in shape.steps()[op]]
    fields = {name: getattr(config, name) for name in GRIDS[op]}
    changes = {name: value for name, value in fields.items() if value != getattr(default, name)}

    def measure() -> Numbers:
        times = [round(step().us, 2) for step in steps]
        kind = jax.devices()[0].device_kind
        return {"op": op, "key": shape.key(op), "changes": changes, "config": fields, "us_of_steps": times, "device_kind": kind}

    return measure


def cases(setting: Setting) -> list[Case]:
    setting.needs_cuda()
    from jaxserve.bench.kernels import kernels_here

    kernels, shape = kernels_here(), read_shape(setting.shape)
    found = []
    for op in shape.steps():
        default = kernels.default_config(op, shape)
        for config in (default, *kernels.others(op, shape, default)):
            fields = dataclasses.asdict(config)
            text = ", ".join(f"{name} {fields[name]}" for name in kernels.tunable(op))
            found.append(Case(f"{shape.key(op)}: {text}", functools.partial(time_config, op, shape, config, default, setting)))
    return found
