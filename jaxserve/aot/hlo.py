"""What a compiled program's HLO says: its collectives, its TPU kernels and the VMEM they take, copies of the KV cache."""

from __future__ import annotations

import collections
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
_VMEM = re.compile(r'"used_scoped_memory_configs":\[(.*?)\]')
_VMEM_SIZE = re.compile(r'"memory_space":"1","offset":"\d+","size":"(\d+)"')  # memory space 1 is VMEM


def count_collectives(hlo: str) -> dict[str, int]:
    """Collective -> how many instructions; an asynchronous pair, or one handed to a SparseCore, counts once."""
    return dict(collections.Counter(match[1] for match in _COLLECTIVE.finditer(hlo)))


def expected_collectives(config: ModelConfig, tp_size: int, *, stacked: bool = False) -> Mapping[str, int]:
    """Of a forward program: two all-reduces per layer and one of the embedding, one all-gather of the logits, nothing else.

    A reduce-scatter and an all-gather in place of each all-reduce would send the same bytes: that is what XLA's rings do inside
    one. It would pay where products overlap with either, and cost a second latency in every decode step. `stacked`: the layers
    are the body of a loop, which stands in the program once.
    """
    if tp_size == 1:
        return {}
    return {"all-reduce": 2 * (1 if stacked else config.num_layers) + 1, "all-gather": 1}


def tpu_kernels(hlo: str) -> dict[str, int]:
    """Name of a Pallas TPU kernel -> the most VMEM a call of it takes, in bytes."""
    found: dict[str, int] = {}
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name, vmem = _KERNEL_NAME.search(line), _VMEM.search(line)
            size = sum(map(int, _VMEM_SIZE.findall(vmem[1]))) if vmem else 0
            key = name[1] if name else "unnamed"
            found[key] = max(size, found.get(key, 0))
    return found


def copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions that make another array of this shape, such as a second KV cache."""
    dims = ",".join(map(str, shape))
    made = rf"= \(?\w+\[{dims}\]\S* (?:copy|copy-start|convert|transpose|fusion|dynamic-update-slice)\("
    return [line.strip()[:200] for line in hlo.splitlines() if re.search(made, line)]
