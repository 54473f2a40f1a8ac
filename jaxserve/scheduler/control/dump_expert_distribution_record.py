"""dump_expert_distribution_record: writes how many tokens went to each expert into a file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands import DumpExpertRecord
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route, each_message
from jaxserve.scheduler.control.start_expert_distribution_record import ExpertDistributionReqOutput, carry_out

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler

FOLDER_VARIABLE = "JAXSERVE_EXPERT_DISTRIBUTION_RECORDER_DIR"


class DumpExpertDistributionReq(ControlStruct):
    """Writes what was recorded into a JSON file in $JAXSERVE_EXPERT_DISTRIBUTION_RECORDER_DIR (else the folder for temporary
    files), and forgets it. `logical_count` has a list for each layer: how many tokens went to each expert."""


class DumpExpertDistributionReqOutput(ExpertDistributionReqOutput):
    file: str


def dump(scheduler: Scheduler, request: DumpExpertDistributionReq) -> Generator[None, None, DumpExpertDistributionReqOutput]:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    file = str(folder.absolute() / f"expert_distribution_recorder_{time.time_ns()}.json")
    yield from carry_out(scheduler, DumpExpertRecord(file), CONTROL.name)
    return DumpExpertDistributionReqOutput(f"The record is in {file}.", file)


CONTROL = Control(
    name="dump_expert_distribution_record",
    request=DumpExpertDistributionReq,
    reply=DumpExpertDistributionReqOutput,
    handlers={SCHEDULER: dump},
    route=Route("/dump_expert_distribution_record", ("POST", "GET"), render=each_message),
    takes_long=True,
)
