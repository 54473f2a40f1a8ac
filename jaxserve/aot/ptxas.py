"""What ptxas says of each kernel: registers, shared memory, spills. Mosaic GPU prints it; here it is caught and parsed."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Makes Mosaic GPU print ptxas' report. It goes to the process's output, not to Python's.
_DUMP_FLAG = "MOSAIC_GPU_DUMP_PTXAS"

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '(?P<target>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """One kernel as ptxas built it."""

    name: str
    target: str  # sm_90a
    registers: int  # per thread at entry; warpgroups may move some between them later
    stack_bytes: int
    spill_bytes: int  # stores and loads
    warnings: tuple[str, ...]  # ptxas' own, such as a setmaxnreg or wgmma pipelining it had to ignore


def compile_with_report(lowered: Any) -> tuple[Any, list[KernelResources]]:
    """Compiles a `jax.stages.Lowered`; returns the executable and a report per Mosaic GPU kernel.

    A kernel that an earlier compilation of this process already built may be missing from the report.
    """
    previous = os.environ.get(_DUMP_FLAG)
    os.environ[_DUMP_FLAG] = "1"
    try:
        with caught_output() as text:
            compiled = lowered.compile()
    finally:
        if previous is None:
            del os.environ[_DUMP_FLAG]
        else:
            os.environ[_DUMP_FLAG] = previous
    return compiled, parse_report(text[0])


def parse_report(text: str) -> list[KernelResources]:
    # C75xx are performance losses that ptxas calls information: a setmaxnreg ignored, a wgmma pipeline serialised.
    warnings = tuple(line.strip() for line in text.splitlines() if "warning" in line.lower() or "(C75" in line)
    return [
        KernelResources(
            match["name"], match["target"], int(match["registers"]), int(match["stack"]),
            int(match["stores"]) + int(match["loads"]), warnings,
        )
        for match in _ENTRY.finditer(text)
    ]  # fmt: skip


@contextmanager
def caught_output() -> Iterator[list[str]]:
    """Everything written to file descriptors 1 and 2 meanwhile, as one text, once the block has ended."""
    text: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            for descriptor, copy in enumerate(saved, start=1):
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))
