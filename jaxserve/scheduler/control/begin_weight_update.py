"""begin_weight_update: update_weights_from_tensor takes tensors in from now on, and end_weight_update replaces all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.update_weights_from_tensor import (
    OpenUpdate,
    TakesTensors,
    TensorUpdateOutput,
    check_takes_tensors,
    success_and_message,
)

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class BeginWeightUpdateReqInput(ControlStruct):
    """From now on /update_weights_from_tensor takes tensors in, and /end_weight_update replaces the weights by all of them at
    once. What an update that was begun before has taken in, and not ended, is given up."""

    selector: str = "all"  # SGLang's: of the models of a server


def check(manager: TakesTensors, request: BeginWeightUpdateReqInput) -> TensorUpdateOutput:
    if request.selector != "all":
        raise ControlError(f'selector must be "all" or absent; got {request.selector!r}.')
    check_takes_tensors(manager)
    return TensorUpdateOutput(True, "")


def begin(scheduler: Scheduler, request: BeginWeightUpdateReqInput) -> TensorUpdateOutput:
    with scheduler.commands.serving(CONTROL.name):
        scheduler.commands.forget_tensors()
        scheduler.commands.open_update = OpenUpdate()
    return TensorUpdateOutput(True, "The update of weights has begun.")


CONTROL = Control(
    name="begin_weight_update",
    request=BeginWeightUpdateReqInput,
    reply=TensorUpdateOutput,
    handlers={TOKENIZER: check, SCHEDULER: begin},
    route=Route("/begin_weight_update"),
    result=success_and_message,
)
