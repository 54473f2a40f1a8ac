"""freeze_gc: what is alive now is no longer looked at by the garbage collector, in every process.

A full collection takes longer the more objects there are, and all requests wait for it. Meant for a warmed-up server.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import msgspec

from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route


class FreezeGCReq(ControlStruct):
    """Takes all objects that are alive out of garbage collection, in every process."""


class FreezeGCReqOutput(msgspec.Struct):
    num_frozen: int


def freeze(component: object, request: FreezeGCReq) -> FreezeGCReqOutput:
    gc.collect()
    gc.freeze()
    return FreezeGCReqOutput(gc.get_freeze_count())


def as_text(replies: Sequence[FreezeGCReqOutput]) -> str:
    return "Garbage collection frozen.\n"


CONTROL = Control(
    name="freeze_gc",
    request=FreezeGCReq,
    reply=FreezeGCReqOutput,
    handlers={TOKENIZER: freeze, FRONT: freeze, SCHEDULER: freeze, DETOKENIZER: freeze},
    lasting="each",
    route=Route("/freeze_gc", ("POST", "GET"), render=as_text),
)
