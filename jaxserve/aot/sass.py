"""The machine code of GPU kernels, read: instructions, basic blocks, loops, and the path that most turns of a loop take.

`compile_with_sass` compiles a program for a GPU that need not be there and hands back each Mosaic GPU kernel's code, taken
apart by nvdisasm (pip install nvidia-cuda-nvdisasm). What its numbers mean for time is `gpu_schedule`'s.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxserve.aot.ptxas import caught_output

_DUMP_FLAG, _TOOLS = "MOSAIC_GPU_DUMP_SASS", "MOSAIC_GPU_CUDA_ROOT"
# Mosaic GPU runs bin/nvdisasm of the folder that _TOOLS names on each kernel's cubin, the last argument, and leaves the cubin
# behind in a folder of its own. This one takes both.
_KEEPER = """#!/bin/sh
for cubin; do :; done
mv "$cubin" {folder}/$$.cubin && rmdir "$(dirname "$cubin")"
"""
_KERNEL = re.compile(r"^\s*\.section\s+\.text\.(?P<name>\w+?)(?:_mosaic_gpu_kernel)?,", re.MULTILINE)
_LABEL = re.compile(r"^(?P<label>\.L_x_\d+):", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+)?\s*(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
    r"\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/"
)
_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP", "BREAK")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # the predicate under which it has an effect, as "@!P2"; often ""
    opcode: str  # HGMMA.64x64x16.F32.BF16
    operands: str
    stall: int  # cycles until the same warp may issue its next one
    target: int | None = None  # of a branch

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def always_leaves(self) -> bool:
        """Control never goes on to the next instruction."""
        return self.base in _ENDS and not self.guard and (self.base != "BRA" or self.operands.startswith("`"))


@dataclasses.dataclass(frozen=True)
class Block:
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]  # indices of blocks

    @property
    def is_wait(self) -> bool:
        """It does nothing but ask a barrier again."""
        return len(self.instructions) <= 8 and any("TRYWAIT" in x.opcode for x in self.instructions)


@dataclasses.dataclass(frozen=True)
class Loop:
    header: int
    blocks: frozenset[int]
    depth: int  # loops around it

    def is_within(self, other: Loop) -> bool:
        return self.blocks < other.blocks


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str  # paged_decode
    blocks: tuple[Block, ...]
    compiler: str = ""  # its version, as 13.0.88

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(x for block in self.blocks for x in block.instructions)

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """In the order of the code, without those that only wait for a barrier."""
        return _loops(self.blocks, self.dominators)

    @functools.cached_property
    def dominators(self) -> list[set[int]]:
        """Of each block those that every way to it passes."""
        return _dominators(self.blocks)

    def innermost(self, *bases: str) -> list[Loop]:
        """Loops with an instruction of these, and no loop within them that has one."""
        with_one = [loop for loop in self.loops if any(x.base in bases for x in self._code(loop))]
        return [loop for loop in with_one if not any(other.is_within(loop) for other in with_one)]

    def _code(self, loop: Loop) -> Iterator[Instruction]:
        return (x for block in sorted(loop.blocks) for x in self.blocks[block].instructions)

    def code(self, loop: Loop) -> list[Instruction]:
        """All of a loop's instructions, those for edges and the loops within it included."""
        return list(self._code(loop))

    def steady_path(self, loop: Loop, *bases: str, **limits: int) -> list[Instruction]:
        """What a turn executes that meets no edge: of the ways through the loop with the most instructions of `bases`, the
        shortest. Masks, clearing and waiting once more are beside it. A loop within is counted as one turn of it.

        `limits`: opcodes and how many of them a turn can have at most, where branches exclude each other, which code does not
        show. ValueError if no way has so few.
        """
        return [x for block in _best_path(self, loop, bases, limits) for x in self.blocks[block].instructions]


def compile_with_sass(lowered: Any) -> tuple[Any, list[Kernel]]:
    """Compiles a `jax.stages.Lowered`; returns the executable and the code of its Mosaic GPU kernels, by name.

    A kernel that an earlier compilation of this process already built may be missing. FileNotFoundError without nvdisasm.
    """
    with tempfile.TemporaryDirectory() as folder, _kept_cubins(Path(folder)) as cubins, caught_output():
        compiled = lowered.compile()
        read = {cubin: parse(disassemble(cubin)) for cubin in cubins.glob("*.cubin")}
        kernels = {x.name: dataclasses.replace(x, compiler=_compiler(cubin)) for cubin, x in read.items()}
    return compiled, [kernels[name] for name in sorted(kernels)]


def _compiler(cubin: Path) -> str:
    found = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin.read_bytes())
    return found[1].decode() if found else ""


@contextmanager
def _kept_cubins(folder: Path) -> Iterator[Path]:
    keeper = folder / "bin" / "nvdisasm"
    keeper.parent.mkdir()
    keeper.write_text(_KEEPER.format(folder=folder))
    keeper.chmod(0o755)
    import jax.experimental.mosaic.gpu  # noqa: F401  it sets _TOOLS when it is imported

    before = {name: os.environ.get(name) for name in (_DUMP_FLAG, _TOOLS)}
    os.environ |= {_DUMP_FLAG: "1", _TOOLS: str(folder)}
    try:
        yield folder
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_nvdisasm() -> Path:
    """Of the wheel nvidia-cuda-nvdisasm, else of PATH. FileNotFoundError with a sentence."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [file for folder in folders for file in sorted(Path(folder).glob("*/bin/nvdisasm"))]
    on_path = shutil.which("nvdisasm")
    if not found and on_path is None:
        raise FileNotFoundError("Reading GPU code needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found[0] if found else Path(str(on_path))


def disassemble(cubin: Path) -> str:
    """nvdisasm's listing with encodings, which carry the stall counts."""
    command = [str(find_nvdisasm()), "--no-dataflow", "--print-code", "--print-instruction-encoding", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse(listing: str) -> Kernel:
    """A listing of one kernel. ValueError if there is none."""
    name = _KERNEL.search(listing)
    if name is None:
        raise ValueError("The listing has no kernel.")
    places = {match["label"]: match.start() for match in _LABEL.finditer(listing)}
    found = list(_INSTRUCTION.finditer(listing))
    starts = [match.start() for match in found]
    addresses = {}
    index = 0
    for label, place in sorted(places.items(), key=lambda item: item[1]):
        while index < len(starts) and starts[index] < place:
            index += 1
        if index < len(starts):
            addresses[label] = int(found[index]["address"], 16)
    return Kernel(name["name"], _blocks([_instruction(match, addresses) for match in found]))


def _instruction(match: re.Match[str], addresses: dict[str, int]) -> Instruction:
    label = re.search(r"`\((\.L_x_\d+)\)", match["operands"])
    target = addresses.get(label[1]) if label and match["opcode"].startswith("BRA") else None
    stall = int(match["control"], 16) >> 41 & 0xF
    return Instruction(
        int(match["address"], 16), match["guard"] or "", match["opcode"], match["operands"].strip(), stall, target
    )


def _blocks(code: list[Instruction]) -> tuple[Block, ...]:
    targets = {x.target for x in code if x.target is not None}
    runs: list[list[Instruction]] = [[]]
    for x in code:
        if x.address in targets and runs[-1]:
            runs.append([])
        runs[-1].append(x)
        if x.base in _ENDS:
            runs.append([])
    runs = [run for run in runs if run]
    index_of = {run[0].address: index for index, run in enumerate(runs)}

    def successors(index: int) -> tuple[int, ...]:
        last = runs[index][-1]
        following = () if last.always_leaves or index + 1 == len(runs) else (index + 1,)
        return following if last.target is None else (*following, index_of[last.target])

    return tuple(Block(tuple(run), successors(index)) for index, run in enumerate(runs))


def _predecessors(blocks: tuple[Block, ...]) -> dict[int, set[int]]:
    found = collections.defaultdict(set)
    for index, block in enumerate(blocks):
        for following in block.successors:
            found[following].add(index)
    return found


def _loops(blocks: tuple[Block, ...], dominators: list[set[int]]) -> tuple[Loop, ...]:
    """Natural loops: of each back edge, all blocks from which its end is reached without passing its target."""
    predecessors = _predecessors(blocks)
    bodies: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for header in dominators[index].intersection(block.successors):
            body, pending = bodies.setdefault(header, {header}), [index]
            while pending:
                at = pending.pop()
                if at not in body:
                    body.add(at)
                    pending += predecessors[at]
    kept = {header: frozenset(body) for header, body in bodies.items() if len(body) > 1 or not blocks[header].is_wait}
    return tuple(Loop(header, body, sum(body < other for other in kept.values())) for header, body in sorted(kept.items()))


def _dominators(blocks: tuple[Block, ...]) -> list[set[int]]:
    """Blocks that every way to a block passes; none for what is not reached."""
    predecessors, reached, pending = _predecessors(blocks), set(), [0]
    while pending:
        at = pending.pop()
        if at not in reached:
            reached.add(at)
            pending += blocks[at].successors
    found = [{0}, *(set(reached) if index in reached else set() for index in range(1, len(blocks)))]
    changed = True
    while changed:
        changed = False
        for index in sorted(reached - {0}):
            new = set.intersection(*(found[before] for before in predecessors[index] & reached)) | {index}
            changed |= new != found[index]
            found[index] = new
    return found


def _best_path(kernel: Kernel, loop: Loop, bases: tuple[str, ...], limits: dict[str, int]) -> list[int]:
    """Blocks. Ways are told apart by how many instructions with a limit they have; of those with as many, the best is kept."""
    names = tuple(limits)

    @functools.cache
    def best(index: int) -> dict[tuple[int, ...], tuple[int, int, tuple[int, ...]]]:
        """Of the ways from a block to the loop's end: limited ones -> instructions of `bases` negated, instructions, blocks."""
        block = kernel.blocks[index]
        ways: list[tuple[tuple[int, ...], tuple[int, int, tuple[int, ...]]]] = []
        for following in block.successors:
            if following == loop.header:
                ways.append(((0,) * len(names), (0, 0, ())))
            elif following in loop.blocks and following not in kernel.dominators[index]:
                ways += best(following).items()
        mine = collections.Counter(x.base for x in block.instructions)
        found: dict[tuple[int, ...], tuple[int, int, tuple[int, ...]]] = {}
        for counts, (wanted, length, path) in ways:
            key = tuple(count + mine[name] for count, name in zip(counts, names, strict=True))
            way = (wanted - sum(mine[base] for base in bases), length + len(block.instructions), (index, *path))
            if all(count <= limits[name] for count, name in zip(key, names, strict=True)):
                found[key] = min(found.get(key, way), way)
        return found

    ways = best(loop.header).values()
    if not ways:
        place = kernel.blocks[loop.header].instructions[0].address
        raise ValueError(f"{kernel.name}: no way through the loop at {place:#x} within {limits}")
    return list(min(ways)[2])
