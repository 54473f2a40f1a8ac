"""update_weight_version: another label for the weights, which stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route
from jaxserve.scheduler.control.update_weights_from_disk import ShowsWeights

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UpdateWeightVersionReqInput(ControlStruct):
    """Gives the weights another label. Unless `abort_all_requests` is false all requests end first, so that none bears both."""

    new_version: str
    abort_all_requests: bool = True


class UpdateWeightVersionReqOutput(msgspec.Struct):
    success: bool
    message: str
    new_version: str


def update(scheduler: Scheduler, request: UpdateWeightVersionReqInput) -> UpdateWeightVersionReqOutput:
    if request.abort_all_requests:
        scheduler.abort("")
    scheduler.set_args(scheduler.args.replace(weight_version=request.new_version))
    return UpdateWeightVersionReqOutput(True, f"The version of the weights is {request.new_version} now.", request.new_version)


def note_version(
    manager: ShowsWeights, request: UpdateWeightVersionReqInput, replies: Sequence[UpdateWeightVersionReqOutput]
) -> None:
    manager.weights = msgspec.structs.replace(manager.weights, weight_version=request.new_version)


CONTROL = Control(
    name="update_weight_version",
    request=UpdateWeightVersionReqInput,
    reply=UpdateWeightVersionReqOutput,
    handlers={SCHEDULER: update},
    lasting="each",
    route=Route("/update_weight_version"),
    completed=note_version,
)
