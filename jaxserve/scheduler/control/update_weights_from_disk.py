"""update_weights_from_disk: other weights of the same model, from a folder, without a restart. All of them or none."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from jaxserve.commands import CheckTensors, CheckWeights, CommandError, PullTensors, ReadTensors, ReplaceTensors, ReplaceWeights
from jaxserve.messages import SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class UpdateWeightFromDiskReqInput(ControlStruct):
    """Replaces the weights by those in a folder, all or none; requests that run end first, new ones wait.

    abort_all_requests: ends all requests instead. weight_version: a new label; null: it stays. load_format: auto, safetensors,
    orbax, dummy.
    """

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    # SGLang's clients may send these. The first two mean nothing here; of the others only what asks for nothing is taken.
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    is_async: bool = False
    keep_pause: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


class UpdateWeightFromDiskReqOutput(msgspec.Struct):
    success: bool
    message: str
    num_paused_requests: int = 0  # that go on with the new weights when generation continues


class WeightUpdate(NamedTuple):
    """What the Engine's method returns: SGLang's is a tuple."""

    success: bool
    message: str
    num_paused_requests: int


class ServedWeights(msgspec.Struct):
    """What /model_info says of them."""

    model_path: str
    load_format: str
    weight_version: str


class ShowsWeights(Protocol):
    """The TokenizerManager's part."""

    weights: ServedWeights
    released_memory: tuple[str, ...]

    def forget_caches(self) -> None: ...


def check(manager: ShowsWeights, request: UpdateWeightFromDiskReqInput) -> UpdateWeightFromDiskReqOutput:
    for name, default in (("is_async", False), ("keep_pause", False), ("token_step", 0), ("manifest", None)):
        if getattr(request, name) != default:
            raise ControlError(f"{name} is not supported; it must be absent or {msgspec.json.encode(default).decode()}.")
    if not request.flush_cache:
        raise ControlError("flush_cache must be true: what is cached was computed with the old weights.")
    return UpdateWeightFromDiskReqOutput(True, "")


class Replacement(NamedTuple):
    """What an update asks of the scheduler."""

    name: str  # of the control request
    check: CheckWeights | CheckTensors  # before anybody has to wait or to end for it
    replace: ReplaceWeights | ReplaceTensors
    weight_version: str | None
    abort_all_requests: bool
    message: str  # that says it is done
    keeps_cache: bool = False
    read: ReadTensors | PullTensors | None = None  # first of all


def carry_out(scheduler: Scheduler, replacement: Replacement) -> Generator[None, None, UpdateWeightFromDiskReqOutput]:
    commands = scheduler.commands
    try:
        with commands.serving(replacement.name), commands.forgetting(replacement.replace):
            if replacement.read is not None:
                yield from commands.beside_steps(replacement.read)
            yield from commands.beside_steps(replacement.check)
            if replacement.abort_all_requests:
                scheduler.abort("")
            if replacement.keeps_cache:
                scheduler.process_results()
            yield from commands.replace_weights(replacement.replace, keeps_cache=replacement.keeps_cache)
    except CommandError as error:
        return UpdateWeightFromDiskReqOutput(False, str(error))
    if replacement.weight_version is not None:
        scheduler.set_args(scheduler.args.replace(weight_version=replacement.weight_version))
    load = scheduler.load()
    num_paused = load.num_waiting + load.num_running if scheduler.pace.is_paused else 0
    return UpdateWeightFromDiskReqOutput(True, replacement.message, num_paused)


def update(scheduler: Scheduler, request: UpdateWeightFromDiskReqInput) -> Generator[None, None, UpdateWeightFromDiskReqOutput]:
    path, load_format = request.model_path, request.load_format or "auto"
    replacement = Replacement(
        name=CONTROL.name,
        check=CheckWeights(path, load_format),
        replace=ReplaceWeights(path, load_format),
        weight_version=request.weight_version,
        abort_all_requests=request.abort_all_requests,
        message=f"The weights are those of {path} now.",
    )
    return (yield from carry_out(scheduler, replacement))


def note_weights(
    manager: ShowsWeights, request: UpdateWeightFromDiskReqInput, replies: Sequence[UpdateWeightFromDiskReqOutput]
) -> None:
    note_replaced(manager, request.weight_version, request.model_path, request.load_format or "auto")
    manager.forget_caches()


def note_replaced(
    manager: ShowsWeights, weight_version: str | None, model_path: str | None = None, load_format: str | None = None
) -> None:
    """What is None stays as it was."""
    old = manager.weights
    manager.weights = ServedWeights(
        old.model_path if model_path is None else model_path,
        old.load_format if load_format is None else load_format,
        old.weight_version if weight_version is None else weight_version,
    )
    manager.released_memory = tuple(tag for tag in manager.released_memory if tag != "weights")


CONTROL = Control(
    name="update_weights_from_disk",
    request=UpdateWeightFromDiskReqInput,
    reply=UpdateWeightFromDiskReqOutput,
    handlers={TOKENIZER: check, SCHEDULER: update},
    route=Route("/update_weights_from_disk"),
    takes_long=True,
    lasting="newest",
    completed=note_weights,
    result=lambda reply: WeightUpdate(*msgspec.structs.astuple(reply)),
)
