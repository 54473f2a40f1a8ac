"""What libtpu's compiler scheduled: a TPU kernel's loops and the cycles of a turn, read from its dump of final bundles.

A TPU core issues one bundle of instructions per cycle, and the compiler knows all latencies but those of memory beyond VMEM; so
the bundles of a loop's body are the cycles of a turn, if its copies have arrived. This is how a kernel's compute is known here
without a TPU. Nothing of it is documented: it holds for the libtpu versions that the tests of this module pass with.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ARGS = "LIBTPU_INIT_ARGS"
# "   0x2e8 LB: >>>>> { instructions }": address, what stands here (a loop's body begins at LB), a mark per loop around it.
_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(LB)?\w*\s*:\s*(>*)\s*(\{.*)")


@dataclasses.dataclass(frozen=True)
class Loop:
    depth: int  # 1: not inside another
    bundles: int  # of its body, inner loops left out
    products: int  # instructions that start a matrix product
    copies: int  # instructions that start a copy from HBM

    @property
    def cycles(self) -> int:
        return self.bundles


@contextmanager
def dumped_schedules() -> Iterator[Path]:
    """The folder into which libtpu, from its first use in this process on, writes what it compiles within the block.

    RuntimeError if libtpu has been loaded already: it reads its arguments then.
    """
    if "tpu" in _loaded_libtpu():
        raise RuntimeError("libtpu is loaded already: its schedules can be dumped only by a process that asks for it first.")
    before = os.environ.get(_ARGS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_ARGS] = f"{before or ''} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true".strip()
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ[_ARGS]
            else:
                os.environ[_ARGS] = before


def _loaded_libtpu() -> str:
    maps = Path("/proc/self/maps")
    return "tpu" if maps.exists() and "libtpu.so" in maps.read_text() else ""


def take_loops(folder: Path, kernel: str) -> list[Loop]:
    """Of a kernel compiled since the last call, outermost and first ones first; empties the folder. KeyError if it has none."""
    files = sorted(folder.glob(f"*-{kernel}.*final_bundles.txt"))
    files = [file for file in files if "schedule-analysis" not in file.name]
    found = [loops(file.read_text()) for file in files]
    for file in folder.iterdir():
        file.unlink()
    if not found:
        raise KeyError(f"libtpu dumped no schedule of {kernel!r}.")
    return found[-1]


def loops(text: str) -> list[Loop]:
    """Of a dump of final bundles."""
    bundles = [(match[2] == "LB", len(match[3]), match[4]) for match in map(_BUNDLE.match, text.splitlines()) if match]
    found = []
    for first, (is_begin, depth, _) in enumerate(bundles):
        if is_begin:
            end = first + 1
            while end < len(bundles) and bundles[end][1] >= depth and not (bundles[end][0] and bundles[end][1] == depth):
                end += 1
            own = [body for _, inner, body in bundles[first:end] if inner == depth]
            found.append(Loop(depth, len(own), _count("vmatmul", own), _count(r"dma\.hbm_to_vmem", own)))
    return found


def _count(instruction: str, bodies: list[str]) -> int:
    return sum(len(re.findall(instruction, body)) for body in bodies)
