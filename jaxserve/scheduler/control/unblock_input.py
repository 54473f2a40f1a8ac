"""unblock_input: what block_input held goes on as soon as every replica has been told. No error if nothing is blocked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route
from jaxserve.scheduler.control.release_input import ReleaseInputReq

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UnblockInputReqInput(ControlStruct):
    """Ends /block_input: requests that were held go on, in order, as soon as every replica has been told."""


class UnblockInputReqOutput(msgspec.Struct):
    """It has arrived."""

    message: str = "Input unblocked successfully."
    status: str = "ok"


def unblock(scheduler: Scheduler, request: UnblockInputReqInput) -> UnblockInputReqOutput:
    was_blocked = scheduler.input_gate.unblock()
    return UnblockInputReqOutput() if was_blocked else UnblockInputReqOutput("Input was not blocked.")


CONTROL = Control(
    name="unblock_input",
    request=UnblockInputReqInput,
    reply=UnblockInputReqOutput,
    handlers={SCHEDULER: unblock},
    lasting="each",
    then=ReleaseInputReq,
    route=Route("/unblock_input"),
)
