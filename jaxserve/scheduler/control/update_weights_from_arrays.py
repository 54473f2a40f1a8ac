"""update_weights_from_arrays: other weights of the same model, from arrays that the program which the engine is in holds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from jaxserve.commands import CheckTensors, ReplaceTensors
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct
from jaxserve.scheduler.control.update_weights_from_disk import (
    Replacement,
    ShowsWeights,
    UpdateWeightFromDiskReqOutput,
    carry_out,
    note_replaced,
)

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UpdateWeightsFromArraysReq(ControlStruct):
    """Replaces the weights, or with `partial` those that are given, by arrays that were left under the number `handover`."""

    handover: int
    partial: bool
    weight_version: str
    abort_all_requests: bool
    flush_cache: bool  # else what was computed with the old weights stays, and running requests go on at once


def update(scheduler: Scheduler, request: UpdateWeightsFromArraysReq) -> Generator[None, None, UpdateWeightFromDiskReqOutput]:
    replacement = Replacement(
        name="update_weights",
        check=CheckTensors(request.handover, request.partial),
        replace=ReplaceTensors(request.handover, request.partial),
        weight_version=request.weight_version,
        abort_all_requests=request.abort_all_requests,
        message="",
        keeps_cache=not request.flush_cache,
    )
    return (yield from carry_out(scheduler, replacement))


def note_weights(
    manager: ShowsWeights, request: UpdateWeightsFromArraysReq, replies: Sequence[UpdateWeightFromDiskReqOutput]
) -> None:
    note_replaced(manager, request.weight_version)
    if request.flush_cache:
        manager.forget_caches()


CONTROL = Control(
    name="update_weights_from_arrays",
    request=UpdateWeightsFromArraysReq,
    reply=UpdateWeightFromDiskReqOutput,
    handlers={SCHEDULER: update},
    takes_long=True,
    completed=note_weights,
    has_method=False,  # `Engine.update_weights` leaves the arrays first
)
