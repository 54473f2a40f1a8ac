"""set_trace_level: how much of each request is traced, changed while the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from jaxserve.messages import FRONT, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route


class SetTraceLevelReq(ControlStruct):
    """How much of each request is traced from now on: 0 nothing, 1 the request, 2 and its parts, 3 and chunks of prefill.

    Without a level the reply says which it is."""

    level: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None


class SetTraceLevelReqOutput(msgspec.Struct):
    level: int


class Traces(Protocol):
    level: int


class HasTracer(Protocol):
    """The TokenizerManager's part."""

    @property
    def tracer(self) -> Traces | None:
        """None: it was started without."""


def set_trace_level(manager: HasTracer, request: SetTraceLevelReq) -> SetTraceLevelReqOutput:
    if manager.tracer is None:
        raise ControlError("Nothing is traced: start the server with --enable-trace.")
    if request.level is not None:
        manager.tracer.level = request.level
    return SetTraceLevelReqOutput(manager.tracer.level)


def as_text(replies: Sequence[SetTraceLevelReqOutput]) -> str:
    return f"The trace level is {replies[0].level}.\n"


CONTROL = Control(
    name="set_trace_level",
    request=SetTraceLevelReq,
    reply=SetTraceLevelReqOutput,
    handlers={TOKENIZER: set_trace_level, FRONT: set_trace_level},
    route=Route("/set_trace_level", ("POST", "GET"), fields_from="query", render=as_text),
)
