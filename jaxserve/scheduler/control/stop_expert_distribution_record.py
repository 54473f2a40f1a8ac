"""stop_expert_distribution_record: what comes from now on is not recorded; what was is kept to be dumped."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxserve.commands import StopExpertRecord
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route, each_message
from jaxserve.scheduler.control.start_expert_distribution_record import ExpertDistributionReqOutput, carry_out

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class StopExpertDistributionReq(ControlStruct):
    """Records no further. /dump_expert_distribution_record writes what was recorded."""


class StopExpertDistributionReqOutput(ExpertDistributionReqOutput):
    pass


def stop(scheduler: Scheduler, request: StopExpertDistributionReq) -> Generator[None, None, StopExpertDistributionReqOutput]:
    yield from carry_out(scheduler, StopExpertRecord(), CONTROL.name)
    return StopExpertDistributionReqOutput("The record is complete.")


CONTROL = Control(
    name="stop_expert_distribution_record",
    request=StopExpertDistributionReq,
    reply=StopExpertDistributionReqOutput,
    handlers={SCHEDULER: stop},
    lasting="each",
    route=Route("/stop_expert_distribution_record", ("POST", "GET"), render=each_message),
    takes_long=True,
)
