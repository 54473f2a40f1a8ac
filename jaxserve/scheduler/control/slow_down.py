"""slow_down: a pause between steps, to test what a slow server does to its clients and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class SlowDownReqInput(ControlStruct):
    """`forward_sleep_time` seconds pass between the launches of two steps; null or 0: none."""

    forward_sleep_time: Annotated[float, msgspec.Meta(le=3600)] | None = None


class SlowDownReqOutput(msgspec.Struct):
    forward_sleep_time: float | None


def slow_down(scheduler: Scheduler, request: SlowDownReqInput) -> SlowDownReqOutput:
    scheduler.pace.forward_sleep_s = max(request.forward_sleep_time or 0.0, 0.0)
    return SlowDownReqOutput(scheduler.pace.forward_sleep_s or None)


CONTROL = Control(
    name="slow_down",
    request=SlowDownReqInput,
    reply=SlowDownReqOutput,
    handlers={SCHEDULER: slow_down},
    lasting="each",
    route=Route("/slow_down", ("POST", "GET")),
)
