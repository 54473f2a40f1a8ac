"""Compile time of every program of a server: `python -m benchmarks.compile_time --topology v6e:2x4`.

One program at a time, so that seconds compare; CPU seconds are those of the process, of all its threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.model_configs import LLAMA_8B, write_config
from jaxserve.aot.report import compiler_versions, table
from jaxserve.aot.targets import parse_target, without_devices
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.programs import SamplingKey
from jaxserve.models import ModelConfig

NUM_PAGES = 1024


@dataclasses.dataclass(frozen=True)
class Timed:
    """A program and what compiling it took; CPU seconds are of the compilation."""

    kind: str
    name: str
    lower_s: float
    compile_s: float
    cpu_s: float
    temp_bytes: int


def timed(kind: str, name: str, lower: Callable[[], Any], options: dict[str, str] | None) -> Timed:
    start_s = time.perf_counter()
    lowered = lower()
    lowered_s, cpu_s = time.perf_counter(), time.process_time()
    compiled = lowered.compile(compiler_options=options)
    end_s, cpu_end_s = time.perf_counter(), time.process_time()
    temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    print(f"{name} {kind}: {end_s - lowered_s:.1f} s", file=sys.stderr)
    return Timed(kind, name, lowered_s - start_s, end_s - lowered_s, cpu_end_s - cpu_s, temp_bytes)


def llama_on(topology: str, num_layers: int) -> Blueprint:
    target = parse_target(topology)
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_pretrained(write_config(Path(folder), {**LLAMA_8B, "num_hidden_layers": num_layers}))
    args = ServerArgs(model_path="Llama-3.1-8B", tp_size=target.num_devices)
    return Blueprint.draw(args, config, make_mesh(target.num_devices, list(target.devices())))


def measure(blueprint: Blueprint, kinds: list[str]) -> Iterator[Timed]:
    options = {"xla_gpu_autotune_level": "0"} if blueprint.platform == "gpu" else None
    num_pages = blueprint.pages_each(NUM_PAGES)
    for bucket in blueprint.buckets.all:
        if "forward" in kinds:
            yield timed("forward", bucket.name, functools.partial(blueprint.lower, bucket, num_pages), options)
    if "sampling" in kinds:
        programs = blueprint.programs(num_pages)
        for key in SamplingKey.all_of(blueprint.buckets.all):
            yield timed("sampling", key.name, functools.partial(programs.lower_sampling, key), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=["forward", "sampling"])
    options = parser.parse_args()
    without_devices()
    measured = list(measure(llama_on(options.topology, options.num_layers), options.kinds))
    print(f"Llama-3.1-8B, {options.num_layers} layers, {options.topology}; {os.cpu_count()} CPUs; {compiler_versions()}")
    lines = [
        (one.name, one.kind, *(f"{x:.1f}" for x in (one.lower_s, one.compile_s, one.cpu_s, one.temp_bytes / 2**20)))
        for one in measured
    ]
    print("\n".join(table(("program", "kind", "lower s", "compile s", "CPU s", "temp MiB"), lines)))
    for kind in options.kinds:
        of_kind = [one for one in measured if one.kind == kind]
        print(
            f"all {len(of_kind)} {kind}: {sum(one.lower_s for one in of_kind):.0f} s of lowering, "
            f"{sum(one.compile_s for one in of_kind):.0f} s of compilation, {sum(one.cpu_s for one in of_kind):.0f} s of CPU"
        )


if __name__ == "__main__":
    main()
