"""What compiling has shown of each program, kept beside the tests, so that what did not change is not compiled again.

    lowered program -> fingerprint -> in the record? its facts; else compile, read the facts, record them

The tests' assertions run on the facts every time; only the compiler is spared. A fingerprint is taken of the lowered module,
kernels included, without the source lines they come from; a record holds for one set of compilers and one way of reading
facts. `make aot` compiles what is not in records/ and adds it there; `make aot-all` empties them first. They are committed.
A few programs, one of each kind, are compiled in every run (`every_run`), and must be as they were recorded.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from jaxserve.aot import hlo as hlo_reader
from jaxserve.aot import launches, ptxas
from jaxserve.aot.hlo import MadeArray, TpuKernel
from jaxserve.aot.ptxas import KernelResources, compile_with_report

RECORDS = Path(__file__).parent / "records"
COMPILERS = ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvjitlink", "libtpu")
READERS = {  # of machine code, for `study_rows`
    "benchmarks.gpu_schedule": ("jaxserve.aot.gpu_schedule", "jaxserve.aot.sass"),
    "benchmarks.tpu_schedule": ("jaxserve.aot.tpu_schedule",),
}
GPU_KERNEL, TPU_KERNEL = "mosaic_gpu_v2", "tpu_custom_call"  # what Pallas kernels are to XLA
_MODULE_NAME = re.compile(r'sym_name = "(\w+_mosaic_gpu)"')
_DUMP_NAME = re.compile(r'mosaic_gpu.dump_basename = "\w+"')  # numbered through the process
SMALLEST_MADE = 1 << 16  # elements
# In the name of what was traced to it; the last part is the primitive.
_GPU_KERNEL_NAME = re.compile(r'custom_call_target="mosaic_gpu_v2".*?op_name="[^"]*?/(\w+)/\w+"')


def is_kept(array: MadeArray) -> bool:
    return array.opcode.startswith("copy") or array.size >= SMALLEST_MADE


@dataclasses.dataclass(frozen=True)
class Facts:
    """A compiled program, as far as any test asks about it."""

    gpu_kernels: tuple[KernelResources, ...]  # by ptxas, each once
    tpu_kernels: tuple[TpuKernel, ...]
    kernel_names: tuple[str, ...]  # of Mosaic GPU, sorted
    aliasing_kernels: int  # calls of Mosaic GPU kernels that write into an argument
    argument_bytes: int
    aliased_bytes: int
    temp_bytes: int
    launches: int | None  # of a GPU program
    collectives: dict[str, int]
    made: tuple[MadeArray, ...]  # every copy, and what converts or fuses large arrays, each kind once
    open_loops: int  # whose trip count only the device knows
    conditionals: int

    @staticmethod
    def read(compiled: Any, reports: list[KernelResources]) -> Facts:
        text, memory = compiled.as_text(), compiled.memory_analysis()
        return Facts(
            gpu_kernels=tuple(reports),
            tpu_kernels=tuple(hlo_reader.tpu_kernels(text)),
            kernel_names=tuple(sorted(set(_GPU_KERNEL_NAME.findall(text)))),
            aliasing_kernels=len(re.findall(r"mosaic_gpu_v2.*output_to_operand_aliasing", text)),
            argument_bytes=memory.argument_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            launches=None if "tpu_custom_call" in text else launches.count_launches(text),
            collectives=hlo_reader.count_collectives(text),
            made=tuple(sorted({array for array in hlo_reader.made_arrays(text) if is_kept(array)}, key=str)),
            open_loops=text.count(" while(") - text.count("known_trip_count"),
            conditionals=text.count(" conditional("),
        )

    @property
    def copies(self) -> list[MadeArray]:
        return [array for array in self.made if array.opcode.startswith("copy")]

    def copies_of(self, shape: tuple[int, ...]) -> list[MadeArray]:
        """What makes another array of this shape, such as a second KV cache."""
        return [array for array in self.made if array.shape == shape]

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "made": [dataclasses.astuple(array) for array in self.made]}

    @staticmethod
    def of_json(fields: dict[str, Any]) -> Facts:
        gpu = (KernelResources(**{**kernel, "warnings": tuple(kernel["warnings"])}) for kernel in fields["gpu_kernels"])
        tpu = (TpuKernel(**kernel) for kernel in fields["tpu_kernels"])
        made = (MadeArray(opcode, dtype, tuple(shape)) for opcode, dtype, shape in fields["made"])
        lists = {"gpu_kernels": gpu, "tpu_kernels": tpu, "kernel_names": fields["kernel_names"], "made": made}
        return Facts(**{**fields, **{name: tuple(values) for name, values in lists.items()}})


class Record:
    """What one version of JAX has shown: fingerprint -> facts, in a file that several processes may add to."""

    def __init__(self, folder: Path = RECORDS) -> None:
        self.path = folder / f"{compilers()}.json"
        self.compiled = 0
        self.recalled = 0
        self._versions = versions()
        self._known = self._read()
        self._new: dict[str, Any] = {}

    def recall(self, test: str, fingerprint: str, make: Callable[[], Any], *, anew: bool = False) -> Any:
        """The facts (JSON) that were seen under this fingerprint; else, or if they shall be seen `anew`, those `make` sees."""
        known = self._known.get(fingerprint) or self._new.get(fingerprint)
        if known is not None and not anew:
            self.recalled += 1
            return known["facts"]
        facts = json.loads(json.dumps(make()))
        self.compiled += 1
        assert known is None or known["facts"] == facts, f"{test} was recorded as {known['facts']}, and now is {facts}"
        self._new[fingerprint] = {"test": test, "facts": facts}
        return facts

    def write(self) -> None:
        """Adds what is new."""
        if not self._new:
            return
        self.path.parent.mkdir(exist_ok=True)
        with (self.path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            programs = {**self._read(), **self._new}
            ordered = dict(sorted(programs.items(), key=lambda item: (item[1]["test"], item[0])))
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in ordered.items())
            self.path.write_text(f'{{"versions": {json.dumps(self._versions)},\n"programs": {{\n{lines}\n}}}}\n')
        self._known, self._new = programs, {}

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        content = json.loads(self.path.read_text())
        return dict(content["programs"]) if content["versions"] == self._versions else {}


def compilers() -> str:
    """What a record is named after."""
    ptxas_version = chosen_ptxas()
    return f"jax-{jax.__version__}" + (f"-ptxas-{ptxas_version}" if ptxas_version else "")


def chosen_ptxas() -> str | None:
    """The version of the ptxas that the variable PTXAS names, as 13.0.88; None where no ptxas is asked."""
    path = os.environ.get("PTXAS")
    if not path:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return text.split(", V")[1].split()[0]


def versions() -> dict[str, str]:
    """Of the compilers, and of the code that reads what they made."""
    found = {name: importlib.metadata.version(name) for name in COMPILERS}
    readers = (inspect.getsource(module) for module in (hlo_reader, launches, ptxas))
    source = "".join((*readers, inspect.getsource(Facts), inspect.getsource(is_kept)))
    return {**found, "reader": hashlib.sha256(source.encode()).hexdigest()[:16]}


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered program, as far as the compiler sees it."""

    fingerprint: str
    gpu_kernels: dict[str, str]  # fingerprint -> the name that ptxas knows it by

    @staticmethod
    def of(lowered: Any, *more: Any) -> Program:
        """`more` is what else the compiler is told."""
        digest = hashlib.sha256(repr((more, os.environ.get("XLA_FLAGS"))).encode())
        gpu_kernels: dict[str, str] = {}

        def take_kernel(op: Any) -> Any:
            found = _take_kernel(op)
            if found is not None:
                target, text = found
                digest.update(text.encode())
                if target == GPU_KERNEL:
                    (name,) = set(_MODULE_NAME.findall(text))
                    gpu_kernels[hashlib.sha256(text.encode()).hexdigest()] = f"{name}_kernel"
            return ir.WalkResult.ADVANCE

        told = lowered._lowering._compiler_options_kvs  # by jax.jit; the module does not have them
        if told:
            digest.update(repr(sorted(told)).encode())
        module = lowered.compiler_ir("stablehlo")
        with module.context as context:
            context.allow_unregistered_dialects = True
            copy = _without_source_lines(module.operation.clone(ip=False))
            copy.walk(take_kernel)
            digest.update(copy.get_asm(print_generic_op_form=True).encode())
        return Program(digest.hexdigest(), gpu_kernels)


def _without_source_lines(operation: Any) -> Any:
    PassManager.parse("builtin.module(strip-debuginfo)").run(operation)
    return operation


def _take_kernel(op: Any) -> tuple[str, str] | None:
    """The target and text of the Mosaic kernel that `op` calls, if it does, taken out of it: a module of its own inside an
    attribute, with source lines of its own."""
    if op.name != "stablehlo.custom_call":
        return None
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target == GPU_KERNEL:
        config = {named.name: named.attr for named in ir.DictAttr(op.attributes["mhlo.backend_config"])}
        body = ir.StringAttr(config.pop("module")).value_bytes
        del config["kernel_hash"]  # of the body with its source lines
        op.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
    elif target == TPU_KERNEL:
        told = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
        body = base64.b64decode(told["custom_call_config"].pop("body"))
        told["custom_call_config"].pop("debug_locations", None)
        op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(told))
    else:
        return None
    kernel = ir.Module.parse(body, context=op.context)
    return target, _DUMP_NAME.sub("", _without_source_lines(kernel.operation).get_asm(print_generic_op_form=True))


class Prover:
    """Compiles what the record does not have. Mosaic GPU may build a kernel only once in a process: what ptxas said is kept."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._said: dict[str, KernelResources] = {}  # of a kernel, by its fingerprint

    def __call__(self, test: str, lowered: Any, *, anew: bool = False) -> Facts:
        """`anew`: compiles whatever the record says, and fails if it says something else."""
        program = Program.of(lowered)

        def compile_() -> dict[str, Any]:
            compiled, reports = compile_with_report(lowered)
            return Facts.read(compiled, self._of_kernels(program, reports)).as_json()

        return Facts.of_json(self._record.recall(test, program.fingerprint, compile_, anew=anew))

    def _of_kernels(self, program: Program, reports: list[KernelResources]) -> list[KernelResources]:
        new = sorted(reports, key=dataclasses.astuple, reverse=True)
        for kernel, name in program.gpu_kernels.items():
            if kernel not in self._said:
                self._said[kernel] = next(report for report in new if report.name == name)
                new.remove(self._said[kernel])
        return sorted((self._said[kernel] for kernel in program.gpu_kernels), key=dataclasses.astuple)


def study_rows(record: Record, test: str, module: str, arguments: list[str], programs: Iterable[Any]) -> list[dict[str, Any]]:
    """What `python -m module --json ARGUMENTS` says of the lowered `programs`: from the record if none of them
    and nothing that reads them has changed. In a process of its own: it needs what only a new one can ask for."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in (module, *READERS[module])]
    digest = hashlib.sha256("".join(sources).encode())
    for program in programs:
        digest.update(Program.of(program).fingerprint.encode())

    def run() -> Any:
        command = [sys.executable, "-m", module, "--json", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    rows: list[dict[str, Any]] = record.recall(test, digest.hexdigest(), run)
    return rows
