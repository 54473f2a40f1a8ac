"""update_weights_from_tensor: other weights of the same model, in the request itself, as safetensors files; all or a part.

    /update_weights_from_tensor                     replaces what it brings
    /begin_weight_update                            or, for more than a message should carry:
    /update_weights_from_tensor ... (several)       takes in what it brings
    /end_weight_update                              replaces all that was taken in at once: nobody sees two versions

The tensors are kept by the runner; here is what else the requests asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from jaxserve.commands import CheckTensors, CommandError, PullTensors, ReadTensors, ReplaceTensors
from jaxserve.config import ServerArgs
from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.tensor_files import check_is_no_pickle, check_load_format
from jaxserve.scheduler.control.update_weights_from_disk import Replacement, ShowsWeights, carry_out, note_replaced

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UpdateWeightsFromTensorReqInput(ControlStruct):
    """Replaces the weights that are given; requests that run end first, new ones wait. Between /begin_weight_update and
    /end_weight_update what is given is taken in, and the latter replaces all of it at once.

    serialized_named_tensors: safetensors files, in base64; nothing is unpickled. flush_cache false: what was computed with the
    old weights stays, and requests that run go on at once. abort_all_requests: ends all requests instead. weight_version: a new
    label; null: it stays.
    """

    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    # SGLang's clients may send these, which mean nothing here.
    torch_empty_cache: bool = False
    disable_draft_model: bool | None = None


class TensorRequest(Protocol):
    """What one asks for beside its tensors."""

    flush_cache: bool
    abort_all_requests: bool
    weight_version: str | None


class TensorUpdateOutput(msgspec.Struct):
    success: bool
    message: str
    is_replaced: bool = False  # else the tensors are only taken in
    is_flushed: bool = False
    weight_version: str | None = None


@dataclasses.dataclass
class OpenUpdate:
    """What requests since begin_weight_update have asked for beside their tensors."""

    flush_cache: bool = False
    abort_all_requests: bool = False
    weight_version: str | None = None

    def add(self, request: TensorRequest) -> None:
        self.flush_cache |= request.flush_cache
        self.abort_all_requests |= request.abort_all_requests
        if request.weight_version is not None:
            self.weight_version = request.weight_version


class TakesTensors(Protocol):
    """The TokenizerManager's part."""

    args: ServerArgs


def check(manager: TakesTensors, request: UpdateWeightsFromTensorReqInput) -> TensorUpdateOutput:
    files = request.serialized_named_tensors
    check_load_format(request.load_format)
    if not files:
        raise ControlError("serialized_named_tensors must hold at least one safetensors file.")
    for number, data in enumerate(files):
        check_is_no_pickle(f"serialized_named_tensors[{number}]", data)
    check_takes_tensors(manager)
    return TensorUpdateOutput(True, "")


def check_takes_tensors(manager: TakesTensors) -> None:
    if manager.args.nnodes > 1:
        raise ControlError("Tensors must come by update_weights_from_disk with --nnodes above 1.")
    if manager.args.restart_workers:
        raise ControlError(
            "Tensors must come by update_weights_from_disk with --restart-workers: a process that is started again would have "
            "others."
        )


def update(scheduler: Scheduler, request: UpdateWeightsFromTensorReqInput) -> Generator[None, None, TensorUpdateOutput]:
    return (yield from take_in(scheduler, CONTROL.name, request, ReadTensors(tuple(request.serialized_named_tensors))))


def take_in(
    scheduler: Scheduler, name: str, request: TensorRequest, read: ReadTensors | PullTensors
) -> Generator[None, None, TensorUpdateOutput]:
    """Replaces what is read, or keeps it for the update that has begun."""
    commands = scheduler.commands
    if commands.open_update is None:
        alone = OpenUpdate()
        alone.add(request)
        return (yield from replace(scheduler, name, alone, read))
    try:
        with commands.serving(name):
            yield from commands.beside_steps(read)
    except CommandError as error:
        return TensorUpdateOutput(False, str(error))
    commands.open_update.add(request)
    return TensorUpdateOutput(True, "Taken in; /end_weight_update replaces the weights.")


def replace(
    scheduler: Scheduler, name: str, asked: OpenUpdate, read: ReadTensors | PullTensors | None
) -> Generator[None, None, TensorUpdateOutput]:
    """What was read, and `read`; nothing of it is kept."""
    partial = "weights" not in scheduler.commands.released
    replacement = Replacement(
        name=name,
        read=read,
        check=CheckTensors(None, partial),
        replace=ReplaceTensors(None, partial),
        weight_version=asked.weight_version,
        abort_all_requests=asked.abort_all_requests,
        message="The weights are replaced.",
        keeps_cache=not asked.flush_cache,
    )
    reply = yield from carry_out(scheduler, replacement)
    if not reply.success:
        return TensorUpdateOutput(False, reply.message)
    return TensorUpdateOutput(
        True, reply.message, is_replaced=True, is_flushed=asked.flush_cache, weight_version=asked.weight_version
    )


def note_weights(manager: ShowsWeights, request: ControlStruct, replies: Sequence[TensorUpdateOutput]) -> None:
    (first, *_) = replies
    if first.is_replaced:
        note_replaced(manager, first.weight_version)
    if first.is_flushed:
        manager.forget_caches()


def success_and_message(reply: TensorUpdateOutput) -> tuple[bool, str]:
    """What the Engine's methods return, as SGLang's."""
    return reply.success, reply.message


CONTROL = Control(
    name="update_weights_from_tensor",
    request=UpdateWeightsFromTensorReqInput,
    reply=TensorUpdateOutput,
    handlers={TOKENIZER: check, SCHEDULER: update},
    route=Route("/update_weights_from_tensor"),
    takes_long=True,
    completed=note_weights,
    result=success_and_message,
    has_method=False,  # the Engine's makes files of arrays first
)
