"""end_weight_update: replaces the weights by what was taken in since begin_weight_update, all of it or nothing."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.update_weights_from_tensor import (
    TensorUpdateOutput,
    note_weights,
    replace,
    success_and_message,
)

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class EndWeightUpdateReqInput(ControlStruct):
    """Replaces the weights by all that was taken in since /begin_weight_update, as the requests that brought it asked: the
    cache is flushed if one of them said so. If it is refused, all is as before, and what was taken in is given up."""


def end(scheduler: Scheduler, request: EndWeightUpdateReqInput) -> Generator[None, None, TensorUpdateOutput]:
    asked = scheduler.commands.open_update
    if asked is None:
        raise ControlError("No update of weights has begun: /begin_weight_update must come first.")
    return (yield from replace(scheduler, CONTROL.name, asked, None))


CONTROL = Control(
    name="end_weight_update",
    request=EndWeightUpdateReqInput,
    reply=TensorUpdateOutput,
    handlers={SCHEDULER: end},
    route=Route("/end_weight_update"),
    takes_long=True,
    completed=note_weights,
    result=success_and_message,
)
