"""stop_profile: ends the trace that start_profile began; answered when its files are complete."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route, each_message
from jaxserve.scheduler.control.start_profile import ProfileReqOutput

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class StopProfileReq(ControlStruct):
    """Ends the trace that /start_profile began. Answered when its files are complete, in the folder that the reply names."""


class StopProfileReqOutput(ProfileReqOutput):
    pass


def stop(scheduler: Scheduler, request: StopProfileReq) -> Generator[None, None, StopProfileReqOutput]:
    folder = yield from scheduler.profiler.stop()
    if not folder:
        return StopProfileReqOutput("Nothing was profiled: the first step of the trace had not come.", "")
    return StopProfileReqOutput(f"The profile is in {folder}.", folder)


CONTROL = Control(
    name="stop_profile",
    request=StopProfileReq,
    reply=StopProfileReqOutput,
    handlers={SCHEDULER: stop},
    route=Route("/stop_profile", ("POST", "GET"), render=each_message),
    takes_long=True,
)
