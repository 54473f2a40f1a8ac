"""Adapter: one version of a LoRA adapter, and who uses it. Bookkeeping only: `adapters` and `adapter_slots` decide."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.scheduler.req import Place, Req

# Names, sizes and times of the files in its folder.
Stamp = tuple[tuple[str, int, int], ...]


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Adapter:
    name: str
    path: str
    version: int  # of all that were ever loaded; what one computed, no other reads
    is_pinned: bool = False  # keeps its slot and its place in the host's memory
    adapter_id: int = -1  # the runner's, of the newest reading
    stamp: Stamp | None = None  # of its files as they were first read; None: they never were
    load_place: Place | None = None  # while it is being loaded: among those that wait for readings
    problem: str = ""  # why its newest reading failed
    is_read: bool = False  # in the host's memory
    is_retired: bool = False  # its name means another version by now, or nothing: it goes with its last request
    users: dict[Req, None] = dataclasses.field(default_factory=dict)  # requests that have not ended, in order of arrival
    num_rows: int = 0  # of them that hold one
    slot: int | None = None  # on the devices; only while it is read
    loaded_at: int = -1  # when it came into the slot, and when it was used last; counted
    used_at: int = -1
