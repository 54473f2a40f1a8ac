"""flush_cache: forget all cached prefixes, as soon as no request uses the KV cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from jaxserve.messages import SCHEDULER
from jaxserve.scheduler.control.declaration import Control, ControlStruct, Route, first_failure

if TYPE_CHECKING:
    from jaxserve.scheduler.scheduler import Scheduler


class FlushCacheReqInput(ControlStruct, rename={"timeout_s": "timeout"}):
    """Forgets all cached prefixes. Refused while requests run; `timeout` seconds are spent waiting for their end."""

    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class FlushCacheReqOutput(msgspec.Struct):
    success: bool
    message: str = ""


def flush(scheduler: Scheduler, request: FlushCacheReqInput) -> Generator[None, None, FlushCacheReqOutput]:
    give_up_s = scheduler.clock() + request.timeout_s
    while not scheduler.flush_cache():
        if scheduler.clock() >= give_up_s:
            load = scheduler.load()
            message = f"{load.num_running} requests are running and {load.num_waiting} are waiting."
            return FlushCacheReqOutput(success=False, message=message)
        yield
    return FlushCacheReqOutput(success=True)


class KnowsCaches(Protocol):
    """The TokenizerManager's part: what it believes to be cached where."""

    def forget_caches(self) -> None: ...


def note_flushed(manager: KnowsCaches, request: ControlStruct, replies: Sequence[FlushCacheReqOutput]) -> None:
    manager.forget_caches()


def as_text(replies: Sequence[FlushCacheReqOutput]) -> str:
    reply: FlushCacheReqOutput = first_failure(replies)
    return (reply.message or "Cache flushed.") + "\n"


CONTROL = Control(
    name="flush_cache",
    request=FlushCacheReqInput,
    reply=FlushCacheReqOutput,
    handlers={SCHEDULER: flush},
    completed=note_flushed,
    route=Route("/flush_cache", ("POST", "GET"), fields_from="query", render=as_text),
)
