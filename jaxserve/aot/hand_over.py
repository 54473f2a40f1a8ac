"""What lies between the stages of a pipeline: the links that hidden states take from one block of devices to the next.

Each device sends what it has to the one in its place in the next stage, all of a stage at once. Over a switch each has a link
of its own; on a torus they share those that leave their block, which is the most that any route can use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jaxserve.aot.targets import Target

Chip: TypeAlias = tuple[int, ...]  # its place on the torus


def hand_over_bytes_per_s(target: Target, sends: Sequence[Any], receives: Sequence[Any]) -> float:
    """Of each of the devices that send, in one direction."""
    chip = target.chip
    if not hasattr(sends[0], "coords"):
        same_host = sends[0].process_index == receives[0].process_index
        return chip.link_bytes_per_s if same_host else chip.network_bytes_per_s or chip.link_bytes_per_s
    chips = [_chip(device, target) for device in sends]
    divided = sum(chips.count(place) < chip.devices_per_chip for place in chips)  # devices that share a chip with another stage
    within = divided * (chip.in_chip_bytes_per_s or 0.0)
    return (links_out(target, sends) * chip.link_bytes_per_s + within) / len(sends)


def links_out(target: Target, devices: Sequence[Any]) -> int:
    """Links from these devices' chips to others."""
    block = {_chip(device, target) for device in devices}
    return sum(other not in block for place in block for other in _neighbours(target, place))


def are_neighbours(target: Target, devices: Sequence[Any]) -> bool:
    """Each can reach the others without leaving their chips; over a switch all can."""
    if not hasattr(devices[0], "coords"):
        return True
    block = {_chip(device, target) for device in devices}
    reached, new = set[Chip](), {min(block)}
    while new:
        reached |= new
        new = {other for place in new for other in _neighbours(target, place)} & block - reached
    return reached == block


def _chip(device: Any, target: Target) -> Chip:
    return tuple(device.coords[: len(target.shape)])


def _neighbours(target: Target, place: Chip) -> Iterator[Chip]:
    """One for each link."""
    for axis, size in enumerate(target.shape):
        is_ring = size > 1 and target.chip.wrapped_axis > 0 and size % target.chip.wrapped_axis == 0
        for step in (-1, 1):
            at = place[axis] + step
            if is_ring or 0 <= at < size:
                yield (*place[:axis], at % size, *place[axis + 1 :])
