"""release_input: every replica has been told to unblock its input, so what they held goes on. Nobody asks for it: it follows
unblock_input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.block_input import Blockable
from jaxserve.scheduler.control.declaration import Control, ControlStruct

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class ReleaseInputReq(ControlStruct):
    """All have been told; without effect where input was blocked again meanwhile."""


class ReleaseInputReqOutput(msgspec.Struct):
    is_blocked: bool  # again


def release(scheduler: Scheduler, request: ReleaseInputReq) -> ReleaseInputReqOutput:
    scheduler.release_input()
    return ReleaseInputReqOutput(scheduler.input_gate.is_blocked)


def note_release(manager: Blockable, request: ReleaseInputReq, replies: Sequence[ReleaseInputReqOutput]) -> None:
    manager.is_input_blocked = any(reply.is_blocked for reply in replies)


CONTROL = Control(
    name="release_input",
    request=ReleaseInputReq,
    reply=ReleaseInputReqOutput,
    handlers={SCHEDULER: release},
    lasting="each",
    completed=note_release,
)
