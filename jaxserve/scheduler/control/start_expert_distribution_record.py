"""start_expert_distribution_record: how many tokens go to each expert is recorded from now on. What `stop` and `dump` share."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import msgspec

from jaxserve.commands import ExpertRecordCommand, StartExpertRecord
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route, each_message

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class StartExpertDistributionReq(ControlStruct):
    """From now on, records how many tokens go to each expert, in each layer; a record that was begun before is forgotten.

    Needs --expert-distribution-recorder-mode.
    """


class ExpertDistributionReqOutput(msgspec.Struct):
    message: str


def carry_out(scheduler: Scheduler, command: ExpertRecordCommand, name: str) -> Generator[None, None, None]:
    """Raises ControlError and CommandError."""
    if scheduler.args.expert_distribution_recorder_mode is None:
        raise ControlError("Expert distributions are recorded only with --expert-distribution-recorder-mode stat.")
    with scheduler.commands.serving(name):
        scheduler.process_results()
        yield from scheduler.commands.between_steps(command)


def start(scheduler: Scheduler, request: StartExpertDistributionReq) -> Generator[None, None, ExpertDistributionReqOutput]:
    yield from carry_out(scheduler, StartExpertRecord(), CONTROL.name)
    return ExpertDistributionReqOutput("Recording the distribution of tokens over experts.")


CONTROL = Control(
    name="start_expert_distribution_record",
    request=StartExpertDistributionReq,
    reply=ExpertDistributionReqOutput,
    handlers={SCHEDULER: start},
    lasting="each",
    route=Route("/start_expert_distribution_record", ("POST", "GET"), render=each_message),
    takes_long=True,
)
