"""How a compiled GPU program is launched: how many kernels, by its HLO, and which of them stand outside CUDA graphs, by its
thunks, which are what XLA's runtime walks through and can only be seen in a dump.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
# A type is a word or a tuple of types; the opcode follows it.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\((?:[^()]|\([^()]*\))*\)|\S+) (?P<opcode>[\w-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "add-dependency",
    "partition-id", "replica-id",
}  # fmt: skip

_THUNK = re.compile(r"^(?P<indent> *)(?P<number>\d+): (?P<kind>k\w+)")
_GRAPH = "kCommandBuffer"
# Thunks that launch nothing themselves: what stands around an asynchronous copy.
_WRAPPERS = {"kAsyncStart", "kAsyncDone", "kDynamicSliceFusion"}


def count_launches(hlo: str) -> int:
    """Kernels, copies, memsets and library calls of an optimized GPU program.

    A loop counts once per round where their number is known, a branch as its longest side. A library call or a sort counts as
    one, though it may launch several kernels.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        else:
            lines.append(line)
    assert entry, "no ENTRY: is this optimized HLO?"
    return _count(entry, computations)


def _count(name: str, computations: dict[str, list[str]]) -> int:
    return sum(_launches(line, computations) for line in computations[name])


def _launches(line: str, computations: dict[str, list[str]]) -> int:
    found = _INSTRUCTION.match(line)
    if found is None or found["opcode"] in _FREE or found["opcode"].endswith(("-done", "-update")):
        return 0
    if found["opcode"] in ("call", "async-start", "while"):
        trips, called = _TRIPS.search(line), _CALLED.search(line)
        assert called is not None, line
        return (int(trips[1]) if trips else 1) * _count(called[1], computations)
    if found["opcode"] == "conditional":
        branches = _BRANCHES.search(line)
        assert branches is not None, line
        return max(_count(name.strip(" %"), computations) for name in branches[1].split(","))
    return 1


@dataclasses.dataclass(frozen=True)
class Thunks:
    """What the runtime does for one run of a program."""

    graphs: int  # CUDA graphs
    in_graphs: int  # thunks inside them: kernels, copies, library calls
    outside: tuple[str, ...]  # kinds of the others, in order; kWhile is a loop on the host


def read_thunks(lowered: Any, **options: str) -> Thunks:
    """Compiles a `jax.stages.Lowered` for a GPU once more, with a dump, and reads its thunks from there."""
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **options})
        # Without graphs there is nothing after the passes that make them.
        files = sorted(Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"))
        return parse_thunks((files or sorted(Path(folder).glob("*thunk_sequence.txt")))[-1].read_text())


def parse_thunks(text: str) -> Thunks:
    graphs, in_graphs, outside, inside = 0, 0, [], False
    for line in text.splitlines():
        thunk = _THUNK.match(line)
        if thunk is None:
            continue
        if not thunk["indent"]:
            inside = thunk["kind"] == _GRAPH
            graphs += inside
            if not inside:
                outside.append(thunk["kind"])
        elif inside:
            in_graphs += thunk["kind"] not in _WRAPPERS
    return Thunks(graphs, in_graphs, tuple(outside))
