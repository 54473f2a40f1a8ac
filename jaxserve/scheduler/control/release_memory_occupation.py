"""release_memory_occupation: gives the memory of the KV cache, the weights or both back to the devices, while nothing runs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from jaxserve.commands import MEMORY_TAGS, MemoryTag
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class ReleaseMemoryOccupationReqInput(ControlStruct):
    """Gives the memory of the KV cache, the weights or both (default) back, until /resume_memory_occupation.

    Only while nothing runs. New requests are refused with 503 meanwhile; those that a pause keeps waiting go on waiting.
    """

    tags: list[MemoryTag] | None = None  # absent or empty: all that is not released


class ReleaseMemoryOccupationReqOutput(msgspec.Struct):
    released: tuple[MemoryTag, ...]  # all that is now


class HoldsMemory(Protocol):
    """The TokenizerManager's part."""

    released_memory: tuple[str, ...]

    def forget_caches(self) -> None: ...


def release(
    scheduler: Scheduler, request: ReleaseMemoryOccupationReqInput
) -> Generator[None, None, ReleaseMemoryOccupationReqOutput]:
    commands = scheduler.commands
    tags = tuple(dict.fromkeys(request.tags or (tag for tag in MEMORY_TAGS if tag not in commands.released)))
    if not tags:
        raise ControlError("All memory is released already.")
    with commands.serving("release_memory_occupation"):
        scheduler.process_results()  # of steps that only requests which have ended took part in
        yield from commands.release(tags)
    return ReleaseMemoryOccupationReqOutput(commands.released)


def note_released(manager: HoldsMemory, request: ControlStruct, replies: Sequence[ReleaseMemoryOccupationReqOutput]) -> None:
    manager.released_memory = replies[0].released
    if "kv_cache" in manager.released_memory:
        manager.forget_caches()


CONTROL = Control(
    name="release_memory_occupation",
    request=ReleaseMemoryOccupationReqInput,
    reply=ReleaseMemoryOccupationReqOutput,
    handlers={SCHEDULER: release},
    lasting="each",
    route=Route("/release_memory_occupation"),
    takes_long=True,
    completed=note_released,
)
