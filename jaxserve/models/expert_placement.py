"""Which devices hold which experts, and which of them are held twice.

Experts are dealt out to groups of devices, `ep_size` of them; the devices of a group hold the same experts, each a slice of
every expert's columns. In each layer all groups have as many slots, each of which holds an expert; slots that are left
over hold experts that another group holds as well. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.models.specs import MoESpec

IN_ORDER = "trivial"


@dataclasses.dataclass(frozen=True)
class ExpertSlots:
    """Which experts the devices hold in one layer."""

    experts: tuple[int, ...]  # that each slot holds, group by group
    num_groups: int
    slices: int = 1  # devices of a group
    most_copies: int | None = None  # of an expert, in any layer; None: slots hold the experts in order, each once

    @property
    def per_device(self) -> int:
        return len(self.experts) // self.num_groups

    @property
    def by_device(self) -> list[tuple[int, int]]:
        """(expert, number of the slice) of all slots of all devices."""
        groups = [self.experts[start : start + self.per_device] for start in range(0, len(self.experts), self.per_device)]
        return [(expert, part) for group in groups for part in range(self.slices) for expert in group]

    @property
    def table(self) -> np.ndarray | None:
        """int32 [experts, 1 + most_copies]: how many slots hold an expert, and which; None: slot n holds expert n."""
        if self.most_copies is None:
            return None
        table = np.zeros((max(self.experts) + 1, 1 + self.most_copies), np.int32)
        for slot, expert in enumerate(self.experts):
            table[expert, 0] += 1
            table[expert, table[expert, 0]] = slot
        return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Of all layers with experts."""

    ep_size: int
    num_redundant: int = 0  # slots of a layer beyond one for each expert
    most_copies: int | None = None  # as in ExpertSlots
    # Per layer as in ExpertSlots; (): in order. What is compiled does not depend on it, so that it is no part of `repr`.
    experts: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), repr=False)

    def slots_of(self, layer: int, num_experts: int, tp_size: int) -> ExpertSlots:
        """Of the `layer`-th layer with experts."""
        experts = self.experts[layer] if self.experts else tuple(range(num_experts))
        return ExpertSlots(experts, self.ep_size, tp_size // self.ep_size, self.most_copies)

    def check(self, spec: MoESpec, tp_size: int) -> None:
        """ValueError with the numbers if a layer's experts cannot be dealt out so."""
        if tp_size % self.ep_size:
            raise ValueError(f"--ep-size must divide --tp-size {tp_size}; got {self.ep_size}.")
        if (spec.num_experts + self.num_redundant) % self.ep_size:
            more = f" and --ep-num-redundant-experts {self.num_redundant} together" if self.num_redundant else ""
            raise ValueError(f"--ep-size must divide the model's num_experts={spec.num_experts}{more}; got {self.ep_size}.")
        slices = tp_size // self.ep_size
        if spec.intermediate_size % slices:
            raise ValueError(
                f"--tp-size / --ep-size must divide the size of an expert, {spec.intermediate_size}; "
                f"got {tp_size} / {self.ep_size} = {slices}."
            )
        most = spec.num_experts * (self.ep_size - 1)
        if self.num_redundant > most:
            raise ValueError(
                f"--ep-num-redundant-experts must be at most {most}, all {spec.num_experts} experts in each of --ep-size "
                f"{self.ep_size} groups; got {self.num_redundant}."
            )


def place_experts(
    *,
    layers: Sequence[MoESpec | None],
    architecture: str,
    tp_size: int,
    ep_size: int | None,
    num_redundant: int,
    location: str,
) -> ExpertPlacement | None:
    """From the options --ep-size, --ep-num-redundant-experts and --init-expert-location; None: whole experts in order on each
    device. `layers`: the mixture of each, if it has one. ValueError says which option asks for what cannot be.
    """
    ep_size = tp_size if ep_size is None else ep_size
    is_in_order = num_redundant == 0 and location == IN_ORDER
    if is_in_order and ep_size == tp_size:
        return None
    mixtures = [layer for layer in layers if layer is not None]
    if not mixtures:
        if is_in_order and ep_size == 1:
            return None
        raise ValueError(f"--ep-size {ep_size} needs a model with experts; {architecture} has none.")
    placement = ExpertPlacement(ep_size=ep_size, num_redundant=num_redundant)
    for spec in dict.fromkeys(mixtures):
        placement.check(spec, tp_size)
    if is_in_order:
        return placement
    if ep_size == 1:
        raise ValueError("--init-expert-location needs several groups of devices to place experts on; --ep-size is 1.")
    counts = {spec.num_experts for spec in mixtures}
    if len(counts) > 1:
        raise ValueError(f"--init-expert-location needs a model whose layers have as many experts each; got {sorted(counts)}.")
    num_experts = counts.pop()
    num_slots = num_experts + num_redundant
    if location == IN_ORDER:
        experts = [tuple(slot % num_experts for slot in range(num_slots))] * len(mixtures)
    else:
        has_experts = [layer is not None for layer in layers]
        experts = _located(_read_location(location), has_experts, num_experts, num_slots, ep_size)
    most = max(int(np.bincount(of_layer).max()) for of_layer in experts)
    return dataclasses.replace(placement, most_copies=most, experts=tuple(experts))


def balanced(loads: Sequence[float], num_slots: int, num_groups: int) -> tuple[int, ...]:
    """Experts for each group's slots so that groups get about as much work: `loads` of each expert, tokens perhaps.

    Slots that are left over go, one by one, to the expert whose copies have most to do. Then copies are dealt out, those with
    most to do first, each to the group that has least so far of those with a free slot, if it can be without that expert.
    """
    wanted = np.asarray(loads, np.float64) + 1  # so that experts that nobody asked for are told apart by their copies
    copies = np.ones(len(wanted), np.int64)
    for _ in range(num_slots - len(wanted)):
        copies[np.argmax(np.where(copies < num_groups, wanted / copies, -1))] += 1
    share = wanted / copies
    by_share = np.argsort(-share, kind="stable")
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    work = np.zeros(num_groups)
    for expert in np.repeat(by_share, copies[by_share]).tolist():
        free = [group for group in range(num_groups) if len(groups[group]) < num_slots // num_groups]
        group = min(free, key=lambda group: (expert in groups[group], work[group]))
        groups[group].append(expert)
        work[group] += share[expert]
    return tuple(expert for of_group in groups for expert in sorted(of_group))


def _read_location(location: str) -> dict[str, Any]:
    """What --init-expert-location names or is."""
    if location.endswith(".pt"):
        raise ValueError(f"--init-expert-location takes JSON or a file of it, not one of PyTorch's; got {location!r}.")
    try:
        text = Path(location).read_text(encoding="utf-8") if location.endswith(".json") else location
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--init-expert-location {location!r} cannot be read as JSON: {error}.") from error
    names = ("physical_to_logical_map", "logical_count")
    if not isinstance(found, dict) or sum(name in found for name in names) != 1:
        raise ValueError(f"--init-expert-location must be a JSON object with {' or '.join(names)}; got {location[:80]!r}.")
    return found


def _located(
    found: dict[str, Any], has_experts: Sequence[bool], num_experts: int, num_slots: int, ep_size: int
) -> list[tuple[int, ...]]:
    """Per layer with experts."""
    if "logical_count" in found:
        counts = _numbers(found["logical_count"], "logical_count", has_experts, num_experts, (2, 3))
        if counts.min(initial=0) < 0:
            raise ValueError(f"logical_count of --init-expert-location must not be negative; got {counts.min()}.")
        return [balanced(of_layer, num_slots, ep_size) for of_layer in counts]
    name = "physical_to_logical_map"
    slots = _numbers(found[name], name, has_experts, num_slots, (2,))
    for of_layer in slots:
        if set(of_layer.tolist()) != set(range(num_experts)):
            raise ValueError(f"{name} of --init-expert-location must name all of {num_experts} experts in every layer.")
    return [tuple(of_layer.tolist()) for of_layer in slots]


def _numbers(value: Any, name: str, has_experts: Sequence[bool], width: int, dims: tuple[int, ...]) -> np.ndarray:
    """int64 [layers with experts, width] of lists of lists, those of all layers or of these alone; of several, the sum."""
    try:
        numbers = np.array(value)
    except ValueError:
        numbers = np.zeros(0, np.object_)
    if numbers.ndim not in dims or numbers.dtype.kind not in "iu":
        raise ValueError(f"{name} of --init-expert-location must be whole numbers [layers, {width}].")
    if numbers.ndim == 3:
        numbers = numbers.sum(axis=0)
    if len(numbers) == len(has_experts):
        numbers = numbers[np.array(has_experts)]
    if numbers.shape != (sum(has_experts), width):
        expected = f"[{len(has_experts)} or {sum(has_experts)}, {width}]"
        raise ValueError(f"{name} of --init-expert-location must be {expected} numbers; got {list(numbers.shape)}.")
    return numbers
