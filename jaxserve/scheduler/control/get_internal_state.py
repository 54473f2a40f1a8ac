"""get_internal_state: what the scheduler does right now. /server_info and /v1/loads show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class GetInternalStateReq(ControlStruct):
    """Counters, load, and the options that set_internal_state may change."""


class GetInternalStateReqOutput(msgspec.Struct):
    internal_state: dict[str, Any]


def get_internal_state(scheduler: Scheduler, request: GetInternalStateReq) -> GetInternalStateReqOutput:
    return GetInternalStateReqOutput(scheduler.internal_state())


CONTROL = Control(
    name="get_internal_state",
    request=GetInternalStateReq,
    reply=GetInternalStateReqOutput,
    handlers={SCHEDULER: get_internal_state},
)
