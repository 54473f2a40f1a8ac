"""One program through the target's compiler: how long it took, what it needs, what it is made of."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve.aot.hlo import MadeArray, copies_of, count_collectives, tpu_kernels
from jaxserve.aot.launches import count_launches
from jaxserve.executor.memory import ProgramMemory


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """Bytes are those of one device, as the compiler counts them. `error`: it did not compile, and nothing else is known."""

    name: str
    compile_s: float
    argument_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0  # outputs that lie where arguments did
    temp_bytes: int = 0
    code_bytes: int = 0
    xla_flops: float | None = None  # XLA's own count, without what kernels do; None where it has none
    xla_bytes: float | None = None
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    kernel_vmem: dict[str, int] = dataclasses.field(default_factory=dict)  # TPU kernel -> bytes of VMEM
    launches: int | None = None  # GPU: kernels, copies and library calls of a run
    pool_copies: int = 0  # instructions that may copy the KV cache, as there is room for it; there should be none
    error: str | None = None

    @property
    def new_output_bytes(self) -> int:
        return self.output_bytes - self.aliased_bytes

    @property
    def memory(self) -> ProgramMemory:
        return ProgramMemory(
            arguments=self.argument_bytes,
            temporaries=self.temp_bytes,
            new_outputs=self.new_output_bytes,
            code=self.code_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A lowered program that compiles to its report. The executable is written to a file, if asked for, and dropped."""

    name: str
    lowered: Any  # jax.stages.Lowered
    platform: str
    pool_shapes: tuple[tuple[int, ...], ...]  # on one device
    compiler_options: dict[str, str] | None
    save_to: Path | None

    def compile(self) -> ProgramReport:
        started_s = time.monotonic()
        try:
            compiled = self.lowered.compile(compiler_options=self.compiler_options)
        except jax.errors.JaxRuntimeError as error:
            return ProgramReport(self.name, time.monotonic() - started_s, error=_first_line(error))
        compile_s = time.monotonic() - started_s
        if self.save_to is not None:
            payload, _, _ = serialize_executable.serialize(compiled)
            file = self.save_to / f"{self.name.replace(' ', '_').replace('=', '')}.xla"
            file.write_bytes(payload)
        memory, cost, hlo = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
        room = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return ProgramReport(
            self.name,
            compile_s,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            xla_flops=cost.get("flops"),
            xla_bytes=cost.get("bytes accessed"),
            collectives=count_collectives(hlo),
            kernel_vmem=_kernel_vmem(hlo),
            launches=count_launches(hlo) if self.platform == "gpu" else None,
            # A fusion that ends in a scatter into the pool makes such an array, too: in place, where no second one fits.
            pool_copies=sum(_num_bytes(made) <= room for shape in self.pool_shapes for made in copies_of(hlo, shape)),
        )


def _num_bytes(array: MadeArray) -> int:
    bits = re.search(r"\d+", array.dtype)  # pred has none
    return array.size * (int(bits[0]) if bits else 8) // 8


def _kernel_vmem(hlo: str) -> dict[str, int]:
    """The most of a kernel's calls."""
    found: dict[str, int] = {}
    for kernel in tpu_kernels(hlo):
        found[kernel.name] = max(kernel.vmem_bytes, found.get(kernel.name, 0))
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
