"""update_weights_from_distributed: other weights of the same model, fetched from the process that has them.

Like update_weights_from_tensor, with which it shares begin and end, except for how the tensors come: the trainer's process
offers arrays by jax.experimental.transfer, once for each replica, and each pulls its offer. `jaxserve.WeightSender` does that.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxserve.commands import OfferedTensor, PullTensors
from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.update_weights_from_tensor import (
    TakesTensors,
    TensorUpdateOutput,
    check_takes_tensors,
    note_weights,
    success_and_message,
    take_in,
)

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler

_MOST_REPLICAS = 1 << 16
_MOST_UUID = 2**63 - _MOST_REPLICAS


class UpdateWeightsFromDistributedReqInput(ControlStruct):
    """As /update_weights_from_tensor, with tensors that the server's processes fetch from the one that offers them:
    jaxserve.WeightSender, or any transfer server of JAX.

    address: host:port of that transfer server. uuid: of the offer to the first replica; replica i fetches uuid + i. names,
    dtypes, shapes: of the arrays offered, in their order. timeout_s: how long they may take to come.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    address: str
    uuid: int
    timeout_s: float = 300.0
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


def check(manager: TakesTensors, request: UpdateWeightsFromDistributedReqInput) -> TensorUpdateOutput:
    counts = len(request.names), len(request.dtypes), len(request.shapes)
    if not request.names or len({*counts}) > 1:
        raise ControlError(f"names, dtypes and shapes must each have one entry for each tensor; got {counts} entries.")
    if any(size < 0 for shape in request.shapes for size in shape):
        raise ControlError("shapes must hold no negative numbers.")
    host, _, port = request.address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ControlError(f"address must be host:port of a transfer server; got {request.address!r}.")
    if not 0 <= request.uuid < _MOST_UUID:
        raise ControlError(f"uuid must be in [0, {_MOST_UUID}); got {request.uuid}.")
    if not request.timeout_s > 0:
        raise ControlError(f"timeout_s must be positive; got {request.timeout_s:g}.")
    check_takes_tensors(manager)
    return TensorUpdateOutput(True, "")


def update(scheduler: Scheduler, request: UpdateWeightsFromDistributedReqInput) -> Generator[None, None, TensorUpdateOutput]:
    described = zip(request.names, request.dtypes, request.shapes, strict=True)
    pull = PullTensors(
        address=request.address,
        uuid=request.uuid + scheduler.address.rank,
        tensors=tuple(OfferedTensor(name, dtype, tuple(shape)) for name, dtype, shape in described),
        timeout_s=request.timeout_s,
    )
    return (yield from take_in(scheduler, CONTROL.name, request, pull))


CONTROL = Control(
    name="update_weights_from_distributed",
    request=UpdateWeightsFromDistributedReqInput,
    reply=TensorUpdateOutput,
    handlers={TOKENIZER: check, SCHEDULER: update},
    route=Route("/update_weights_from_distributed"),
    takes_long=True,
    completed=note_weights,
    result=success_and_message,
)
