"""resume_memory_occupation: takes released memory again: an empty KV cache, the weights from the folder they came from last."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxserve.commands import MemoryTag
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.release_memory_occupation import ReleaseMemoryOccupationReqOutput, note_released

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class ResumeMemoryOccupationReqInput(ControlStruct):
    """Takes released memory again: an empty KV cache, and the weights from the folder they came from last."""

    tags: list[MemoryTag] | None = None  # absent or empty: all that is released


class ResumeMemoryOccupationReqOutput(ReleaseMemoryOccupationReqOutput):
    pass


def resume(
    scheduler: Scheduler, request: ResumeMemoryOccupationReqInput
) -> Generator[None, None, ResumeMemoryOccupationReqOutput]:
    commands = scheduler.commands
    tags = tuple(dict.fromkeys(request.tags or commands.released))
    if not tags:
        raise ControlError("No memory is released.")
    with commands.serving("resume_memory_occupation"):
        yield from commands.resume(tags)
    return ResumeMemoryOccupationReqOutput(commands.released)


CONTROL = Control(
    name="resume_memory_occupation",
    request=ResumeMemoryOccupationReqInput,
    reply=ResumeMemoryOccupationReqOutput,
    handlers={SCHEDULER: resume},
    lasting="each",
    route=Route("/resume_memory_occupation"),
    takes_long=True,
    completed=note_released,
)
