"""set_internal_state: change options of the running scheduler.

All of them or none. SGLang's own knobs (speculative acceptance thresholds, pp_max_micro_batch_size) have nothing to turn here,
so they are refused like every other name that is not listed.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxserve.config import ServerArgs
from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.changeable import CHANGEABLE, changeable
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class SetInternalStateReq(ControlStruct):
    """Changes options of the running scheduler, all or none. The reply says true for each replica."""

    server_args: dict[str, Any]


class SetInternalStateReqOutput(msgspec.Struct):
    updated: bool
    server_args: dict[str, Any]  # as they are now


def set_internal_state(scheduler: Scheduler, request: SetInternalStateReq) -> SetInternalStateReqOutput:
    changes = {name: _checked(name, value) for name, value in request.server_args.items()}
    try:
        args = scheduler.args.replace(**changes)
    except ValueError as error:
        raise ControlError(str(error)) from error
    scheduler.set_args(args)
    return SetInternalStateReqOutput(updated=True, server_args=changeable(args))


def _checked(name: str, value: Any) -> Any:
    if name not in CHANGEABLE:
        known = ", ".join(CHANGEABLE)
        raise ControlError(
            f"server_args.{name} cannot be changed while the server runs; what can: {known}. Nothing was changed."
        )
    try:
        return msgspec.convert(value, typing.get_type_hints(ServerArgs)[name])
    except msgspec.ValidationError as error:
        raise ControlError(f"server_args.{name} is wrong: {error}, value {value!r}.") from error


class LimitsBatches(Protocol):
    """The TokenizerManager's part."""

    def set_max_queued(self, max_queued: int | None) -> None: ...


def note_queue(manager: LimitsBatches, request: ControlStruct, replies: Sequence[SetInternalStateReqOutput]) -> None:
    manager.set_max_queued(replies[0].server_args["max_queued_requests"])


def updated(replies: Sequence[SetInternalStateReqOutput]) -> list[bool]:
    return [reply.updated for reply in replies]


CONTROL = Control(
    name="set_internal_state",
    request=SetInternalStateReq,
    reply=SetInternalStateReqOutput,
    handlers={SCHEDULER: set_internal_state},
    lasting="each",
    completed=note_queue,
    route=Route("/set_internal_state", ("POST", "PUT"), render=updated),
)
