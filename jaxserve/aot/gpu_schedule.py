"""What a GPU kernel's machine code costs an H200: issue slots, tensor-core cycles, shared-memory bytes of a tile, turn by turn.

A static model, for the main loops of kernels that overlap well: every unit is counted as if it were the only one, and the
slowest sets the pace. What memory, caches and barriers add on top, only the device can tell. All cycles are of one
multiprocessor: a warpgroup's four warps are one on each of its four schedulers, so an instruction takes one slot on each.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable

from jaxserve.aot.sass import Instruction, Kernel, Loop

WARPGROUP = 128
SMEM_BYTES_PER_CYCLE = 128  # of a multiprocessor: 32 banks of 4 bytes
# NVIDIA H100 architecture white paper: 4096 bf16 operations per cycle and multiprocessor, dense; 8-bit types twice that.
TENSOR_MACS_PER_CYCLE = {"HGMMA": 2048, "QGMMA": 4096, "IGMMA": 4096}
PRODUCTS = tuple(TENSOR_MACS_PER_CYCLE)
COPIES = ("UTMALDG",)
CONVERSIONS = ("F2FP", "F2F", "I2F", "I2FP", "F2I", "HADD2", "HFMA2")  # of types; a float addition also widens
SCALINGS = ("FMUL",)  # of an accumulator, which a branch around it spares a row's first tile only
# Cycles that a scheduler's unit is busy with one warp's instruction, where that is more than one: 32 lanes over the results
# per cycle of a quarter of a multiprocessor. CUDA C++ Programming Guide, throughput of native arithmetic instructions, 9.0:
# 16 special functions, 64 integer operations, comparisons and conversions, 32 shuffles a cycle of the whole.
UNITS = {
    "special": ("MUFU",),
    "integer": (
        *CONVERSIONS, "IADD3", "VIADD", "LOP3", "SHF", "LEA", "PRMT", "SEL", "FSEL", "ISETP", "FSETP", "PLOP3",
        "FMNMX", "IMNMX", "VIMNMX", "VIADDMNMX",
    ),
    "shuffle": ("SHFL",),
}  # fmt: skip
UNIT_CYCLES = {"special": 8, "integer": 2, "shuffle": 4}

_PRODUCT = re.compile(r"[HQI]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)\.")
_WIDTH = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


@dataclasses.dataclass(frozen=True)
class Product:
    """One wgmma instruction of a warpgroup."""

    rows: int
    columns: int
    depth: int
    itemsize: int
    left_in_registers: bool
    cycles: float

    @staticmethod
    def of(x: Instruction) -> Product:
        rows, columns, depth = map(int, _PRODUCT.match(x.opcode).groups())  # type: ignore[union-attr]
        itemsize = 2 if x.base == "HGMMA" else 1
        operands = x.operands.split(",")
        is_register = operands[1].strip().startswith("R") and operands[1].strip() != "RZ"
        cycles = rows * columns * depth / TENSOR_MACS_PER_CYCLE[x.base]
        return Product(rows, columns, depth, itemsize, is_register, cycles)

    @property
    def macs(self) -> int:
        return self.rows * self.columns * self.depth

    @property
    def smem_bytes(self) -> int:
        """That it reads of shared memory."""
        left = 0 if self.left_in_registers else self.rows
        return (left + self.columns) * self.depth * self.itemsize


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a warpgroup's stretch of code, executed once."""

    instructions: int  # issue slots on each scheduler
    stall_cycles: int  # that one warp takes alone, if nothing but its own stall counts holds it up
    mix: dict[str, int]  # instructions by their opcode's first word
    products: tuple[Product, ...]
    smem_read_bytes: int  # by loads, not by products
    smem_written_bytes: int  # by stores, not by copies
    unit_cycles: dict[str, int]  # UNITS

    @property
    def tensor_cycles(self) -> float:
        return sum(x.cycles for x in self.products)

    @property
    def smem_bytes(self) -> int:
        return self.smem_read_bytes + self.smem_written_bytes + sum(x.smem_bytes for x in self.products)

    @property
    def spills(self) -> int:
        return self.count("LDL", "STL")

    def count(self, *bases: str) -> int:
        return sum(self.mix.get(base, 0) for base in bases)


@dataclasses.dataclass(frozen=True)
class Role:
    """A main loop: what warpgroups of one kind do over and over."""

    name: str  # consumer, producer, loop where it neither multiplies nor copies, whole where there is none
    depth: int  # loops around it
    code_instructions: int  # all that stand in the loop, edges included
    steady: Cost  # a turn that meets no edge
    path: tuple[Instruction, ...]


def cost(code: Iterable[Instruction]) -> Cost:
    code = list(code)
    mix = collections.Counter(x.base for x in code)
    units = {unit: cycles * sum(mix[base] for base in UNITS[unit]) for unit, cycles in UNIT_CYCLES.items()}
    return Cost(
        len(code),
        sum(x.stall for x in code),
        dict(mix.most_common()),
        tuple(Product.of(x) for x in code if x.base in PRODUCTS),
        sum(_smem_bytes(x) for x in code if x.base in ("LDS", "LDSM")),
        sum(_smem_bytes(x) for x in code if x.base in ("STS", "STSM")),
        units,
    )


def _smem_bytes(x: Instruction) -> int:
    """Of a warpgroup's four warps."""
    words = x.opcode.split(".")
    if x.base in ("LDSM", "STSM"):  # matrices of 8 x 8 values of 16 bits
        return 4 * 128 * int(words[-1] if words[-1].isdigit() else 1)
    return WARPGROUP * next((_WIDTH[word] for word in words if word in _WIDTH), 4)


def roles(kernel: Kernel, copies: int | None = None) -> list[Role]:
    """A kernel's main loops: innermost ones that multiply (consumers) or else copy (producers); without either, the longest,
    and a kernel without a loop is whole.

    Code that the compiler has more than one of, say with masks and without, gives several; the shortest steady path comes
    first. A producer that also converts does so on its steady path. `copies`: the most that a producer starts in a turn.
    """
    multiplying = kernel.innermost(*PRODUCTS)
    copying = [loop for loop in kernel.innermost(*COPIES) if not any(loop.is_within(x) or loop == x for x in multiplying)]
    copying = [loop for loop in copying if not any(x.is_within(loop) for x in multiplying)]
    found = [_role(kernel, loop, "consumer", *PRODUCTS, *COPIES, *SCALINGS) for loop in multiplying]
    limits = {} if copies is None else dict.fromkeys(COPIES, copies)
    found += [_role(kernel, loop, "producer", *COPIES, *CONVERSIONS, **limits) for loop in copying]
    if not found and kernel.loops:
        found = [_role(kernel, max(kernel.loops, key=lambda loop: len(kernel.code(loop))), "loop")]
    if not found:
        code = kernel.instructions
        found = [Role("whole", 0, len(code), cost(code), code)]
    return sorted(found, key=lambda role: (role.name, role.steady.instructions))


def _role(kernel: Kernel, loop: Loop, name: str, *bases: str, **limits: int) -> Role:
    path = kernel.steady_path(loop, *bases, **limits)
    return Role(name, loop.depth, len(kernel.code(loop)), cost(path), tuple(path))


def events(path: Iterable[Instruction]) -> str:
    """The order of things on a path, in one line: products (what stands between those of one shape is left out), waits until so
    many groups of them are in flight, barriers, and how many other instructions there are in between:
    "wait | 20 | 8 of 64x64x16 | in flight 0 | 190 | 4 of 64x128x16 | in flight 0".
    """
    found: list[tuple[str, int]] = []
    others = 0
    for x in path:
        name = _event(x)
        if not name:
            others += 1
        elif "GMMA" in name and found and found[-1][0] == name:
            found[-1], others = (name, found[-1][1] + 1), 0
        else:
            found += [("", others)] if others else []
            found.append((name, 1))
            others = 0
    found += [("", others)] if others else []
    return " | ".join(f"{count} of {name.split('.', 1)[1]}" if "GMMA" in name else name or str(count) for name, count in found)


def _event(x: Instruction) -> str:
    if x.base in PRODUCTS:
        return ".".join(x.opcode.split(".")[:2])
    if x.opcode.startswith("WARPGROUP.DEPBAR"):
        return f"in flight {int(x.operands.split(',')[-1], 16)}"
    if "TRYWAIT" in x.opcode:
        return "wait"
    return {"SYNCS": "arrive", "BAR": "block barrier", "UTMALDG": "copy"}.get(x.base, "")


def cycles_alone(path: Iterable[Instruction]) -> float:
    """Of a turn in the middle of many, for a warpgroup that has the multiprocessor to itself and never waits at a barrier.

    Instructions take their stall counts, products their time in the tensor cores one after the other, and a wait for products
    lasts until no more groups than it says are in flight. So what a kernel does while its products run is not counted twice.
    """
    path = list(path)
    now = free = 0.0  # when the next instruction is issued, and when the tensor cores have nothing left to do
    groups: list[float] = []  # when each will be done
    starts = []
    for _ in range(4):
        starts.append(now)
        for x in path:
            if x.base in PRODUCTS:
                free = max(free, now) + Product.of(x).cycles
                if "gsb" in x.operands:
                    groups.append(free)
            elif x.opcode.startswith("WARPGROUP.DEPBAR"):
                in_flight = int(x.operands.split(",")[-1], 16)
                now = max([now, *groups[: len(groups) - in_flight]])
            now += x.stall
    return starts[-1] - starts[-2]
