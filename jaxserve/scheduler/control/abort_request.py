"""abort_request: end requests by the beginning of their id, or all. Each still gets its one terminal message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from jaxserve.messages import FRONT, SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class AbortRequest(ControlStruct):
    """Aborts the requests whose id begins with `rid`, or all. Each still gets its last reply; an unknown id is no error."""

    rid: str | None = None
    abort_all: bool | None = None


class AbortRequestOutput(msgspec.Struct):
    pass


class HoldsUnsentRequests(Protocol):
    """The TokenizerManager's part: requests that are still being tokenized."""

    def abort_unsent(self, rid_prefix: str) -> None: ...


def abort_unsent(manager: HoldsUnsentRequests, request: AbortRequest) -> AbortRequestOutput:
    manager.abort_unsent(rid_prefix(request))
    return AbortRequestOutput()


def abort(scheduler: Scheduler, request: AbortRequest) -> AbortRequestOutput:
    scheduler.abort(rid_prefix(request))
    return AbortRequestOutput()


def rid_prefix(request: AbortRequest) -> str:
    """What the ids of the requests meant begin with."""
    if request.abort_all:
        return ""
    if not request.rid:
        raise ControlError("rid (a prefix of request ids) or abort_all: true is required.")
    return request.rid


CONTROL = Control(
    name="abort_request",
    request=AbortRequest,
    reply=AbortRequestOutput,
    handlers={TOKENIZER: abort_unsent, FRONT: abort_unsent, SCHEDULER: abort},
    route=Route("/abort_request", render=lambda replies: ""),
)
