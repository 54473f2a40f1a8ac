"""get_recent_requests: time lines of requests. /recent_requests shows those of all processes."""

from __future__ import annotations

from typing import Protocol

import msgspec

from jaxserve.messages import FRONT, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlStruct
from jaxserve.timeline import RequestTimeline


class GetRecentRequestsReq(ControlStruct):
    """Of the newest requests that have ended, and of all that have not."""


class GetRecentRequestsReqOutput(msgspec.Struct):
    timelines: list[RequestTimeline]


class HasRequests(Protocol):
    """A TokenizerManager's part."""

    def own_recent_requests(self) -> list[RequestTimeline]: ...


def get_recent_requests(manager: HasRequests, request: GetRecentRequestsReq) -> GetRecentRequestsReqOutput:
    return GetRecentRequestsReqOutput(manager.own_recent_requests())


CONTROL = Control(
    name="get_recent_requests",
    request=GetRecentRequestsReq,
    reply=GetRecentRequestsReqOutput,
    handlers={TOKENIZER: get_recent_requests, FRONT: get_recent_requests},
)
