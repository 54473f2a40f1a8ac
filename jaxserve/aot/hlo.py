"""What a compiled program's HLO says: its collectives, its TPU kernels and the VMEM they take, copies of the KV cache."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from jaxserve.models import ModelConfig

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# An opcode stands in front of its parenthesis; names of instructions begin with a percent sign.
_COLLECTIVE = re.compile(rf"(?<![%\w.-])({'|'.join(COLLECTIVES)})(?:-start)?\(")
_KERNEL_NAME = re.compile(r'op_name="[^"]*?/(\w+)/pallas_call')
_TOLD_BYTES = re.compile(r'"cost_estimate":{[^}]*"bytes_accessed":"(\d+)"')
_MADE = re.compile(r"= (\w+)\[([\d,]+)\]\S* (copy|copy-start|copy-done|convert|transpose|fusion|dynamic-update-slice)\(")
_VMEM_RANGE = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')  # memory space 1 is VMEM


def count_collectives(hlo: str) -> dict[str, int]:
    """Collective -> how many instructions; an asynchronous pair, or one handed to a SparseCore, counts once."""
    return dict(collections.Counter(match[1] for match in _COLLECTIVE.finditer(hlo)))


def expected_collectives(config: ModelConfig, tp_size: int) -> Mapping[str, int]:
    """Of a forward program: two all-reduces per layer and one of the embedding, one all-gather of the logits, nothing else.

    A reduce-scatter and an all-gather in place of each all-reduce would send the same bytes: that is what XLA's rings do inside
    one. It would pay where products overlap with either, and cost a second latency in every decode step.
    """
    if tp_size == 1:
        return {}
    return {"all-reduce": 2 * config.num_layers + 1, "all-gather": 1}


@dataclasses.dataclass(frozen=True)
class TpuKernel:
    """A call of a Pallas TPU kernel."""

    name: str
    vmem_bytes: int
    vmem_limit_bytes: int
    told_bytes: int  # of HBM that it moves, by the estimate that XLA schedules with; 0 if it has none


def tpu_kernels(hlo: str) -> list[TpuKernel]:
    return [_tpu_kernel(line) for line in hlo.splitlines() if 'custom_call_target="tpu_custom_call"' in line]


def _tpu_kernel(line: str) -> TpuKernel:
    name, told = _KERNEL_NAME.search(line), _TOLD_BYTES.search(line)
    used, share = (_vmem_range(line, field) for field in ("used_scoped_memory_configs", "scoped_memory_configs"))
    # What is used is counted from address 0; a kernel's share begins behind what XLA keeps in VMEM for itself.
    return TpuKernel(name[1] if name else "unnamed", used.stop - share.start, len(share), int(told[1]) if told else 0)


def _vmem_range(line: str, field: str) -> range:
    """Addresses."""
    entries = re.search(rf'"{field}":\[(.*?)\]', line)
    found = _VMEM_RANGE.search(entries[1]) if entries else None
    return range(int(found[1]), int(found[1]) + int(found[2])) if found else range(0)


@dataclasses.dataclass(frozen=True)
class MadeArray:
    """An array that an instruction makes out of others."""

    opcode: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.opcode} {self.dtype}[{','.join(map(str, self.shape))}]"


def made_arrays(hlo: str) -> list[MadeArray]:
    """By what copies, converts, transposes or updates, or is fused and may do so."""
    found = (match for match in map(_MADE.search, hlo.splitlines()) if match)
    return [MadeArray(match[3], match[1], tuple(map(int, match[2].split(",")))) for match in found]


def copies_of(hlo: str, shape: tuple[int, ...]) -> list[MadeArray]:
    """Instructions that make another array of this shape, such as a second KV cache."""
    return [array for array in made_arrays(hlo) if array.shape == shape]
