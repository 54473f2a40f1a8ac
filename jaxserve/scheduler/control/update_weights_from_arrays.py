"""update_weights_from_arrays: other weights of the same model, from arrays that the program which the engine is in holds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.runner import CheckTensors, CommandError, ReplaceTensors
from jaxserve.scheduler.control.declaration import Control, ControlStruct
from jaxserve.scheduler.control.update_weights_from_disk import Replacement, ShowsWeights, carry_out, note_replaced

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UpdateWeightsFromArraysReq(ControlStruct):
    """Replaces the weights, or with `partial` those that are given, by arrays that were left under the number `handover`."""

    handover: int
    partial: bool
    weight_version: str
    abort_all_requests: bool
    flush_cache: bool  # else what was computed with the old weights stays, and running requests go on at once


class UpdateWeightsFromArraysReqOutput(msgspec.Struct):
    success: bool
    message: str
    num_paused_requests: int = 0  # that go on with the new weights when generation continues


def update(
    scheduler: Scheduler, request: UpdateWeightsFromArraysReq
) -> Generator[None, None, UpdateWeightsFromArraysReqOutput]:
    replacement = Replacement(
        name="update_weights",
        check=CheckTensors(request.handover, request.partial),
        replace=ReplaceTensors(request.handover, request.partial),
        weight_version=request.weight_version,
        abort_all_requests=request.abort_all_requests,
        keeps_cache=not request.flush_cache,
    )
    try:
        num_paused = yield from carry_out(scheduler, replacement)
    except CommandError as error:
        return UpdateWeightsFromArraysReqOutput(False, str(error))
    return UpdateWeightsFromArraysReqOutput(True, "", num_paused)


def note_weights(
    manager: ShowsWeights, request: UpdateWeightsFromArraysReq, replies: Sequence[UpdateWeightsFromArraysReqOutput]
) -> None:
    note_replaced(manager, request.weight_version)
    if request.flush_cache:
        manager.forget_caches()


CONTROL = Control(
    name="update_weights_from_arrays",
    request=UpdateWeightsFromArraysReq,
    reply=UpdateWeightsFromArraysReqOutput,
    handlers={SCHEDULER: update},
    takes_long=True,
    completed=note_weights,
    has_method=False,  # `Engine.update_weights` leaves the arrays first
)
