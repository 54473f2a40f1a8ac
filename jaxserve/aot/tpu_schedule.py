"""What libtpu's compiler scheduled: a TPU kernel's code and the cycles it takes, read from its dump of final bundles.

A TPU core issues one bundle of instructions per cycle, and the compiler knows all latencies but those of memory beyond VMEM:
a block's bundles are its cycles, if the copies it waits for have arrived. This is how a kernel's compute is known here without
a TPU. The dump is not documented: this holds for the libtpu versions that the accelerator lane passes with.
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
# "   0x2e8 LB: >>>>> { instructions }": address, what a branch comes here for, a mark per loop around it.
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?P<label>LH|LB|LE|PB|PF|CT)?\s*:\s*(?P<loops>>*)\s*(?P<body>\{.*)")


@dataclasses.dataclass(frozen=True)
class Block:
    """Bundles that are issued one after the other, between two branches."""

    depth: int  # loops around it
    cycles: int
    products: int  # instructions that multiply in a matrix unit


@contextmanager
def dumped_schedules() -> Iterator[Path]:
    """The folder into which libtpu, from its first use in this process on, writes what it compiles within the block.

    RuntimeError if libtpu has been loaded already: it reads its arguments then.
    """
    if _is_libtpu_loaded():
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


def _is_libtpu_loaded() -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and "libtpu.so" in maps.read_text()


def take_blocks(folder: Path, kernel: str) -> list[Block]:
    """Of the kernel compiled last, in the order of its code; empties the folder. KeyError if libtpu dumped nothing of it."""
    files = [file for file in sorted(folder.glob(f"*-{kernel}.*final_bundles.txt")) if "analysis" not in file.name]
    texts = [file.read_text() for file in files]
    for file in folder.iterdir():
        file.unlink()
    if not texts:
        raise KeyError(f"libtpu dumped no schedule of {kernel!r}.")
    return blocks(texts[-1])


def blocks(text: str) -> list[Block]:
    """Of a dump of final bundles. The slots behind a branch, marked as outside of all loops, end a block."""
    found: list[Block] = []
    bodies: list[str] = []
    depth = 0

    def end() -> None:
        if bodies:
            found.append(Block(depth, len(bodies), len(re.findall("vmatmul", " ".join(bodies)))))
            bodies.clear()

    for match in map(_BUNDLE.match, text.splitlines()):
        if match:
            if match["label"] or len(match["loops"]) != depth:
                end()
            depth = len(match["loops"])
            bodies.append(match["body"])
    end()
    return found


def products(found: list[Block]) -> list[Block]:
    """Those that multiply, the ones in most loops only: what a kernel spends its time on."""
    multiplying = [block for block in found if block.products]
    deepest = max((block.depth for block in multiplying), default=0)
    return [block for block in multiplying if block.depth == deepest]
