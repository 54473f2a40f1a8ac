"""What is written down of a request on the event loop: plain data, from which a thread makes spans later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxserve.server.tracing.context import TraceContext
from jaxserve.timeline import RequestTimeline

Attribute = str | int | float | bool | tuple[str, ...]


@dataclasses.dataclass(slots=True, eq=False)
class HttpTrace:
    """A request over HTTP, whatever it asks the engine for."""

    parent: TraceContext | None  # of the client; None: the trace begins here
    own: TraceContext
    method: str
    path: str
    started_s: float  # Unix times
    ended_s: float = 0.0
    status_code: int = 0  # 0: no reply was begun
    is_used: bool = False  # it asked the engine for something

    def adopt(self, parent: TraceContext) -> None:
        """The body says what the headers did not."""
        self.parent, self.own = parent, parent.child()


@dataclasses.dataclass(slots=True, eq=False)
class CallTrace:
    """What the engine was asked for: one or more sequences."""

    parent: TraceContext | None
    own: TraceContext
    name: str
    attributes: dict[str, Attribute]
    num_left: int  # sequences that have not ended
    level: int
    done: Callable[[CallTrace], None]
    timelines: dict[int, RequestTimeline] = dataclasses.field(default_factory=dict)  # by number of the sequence

    def ended(self, index: int, timeline: RequestTimeline) -> None:
        self.timelines[index] = timeline
        self.num_left -= 1
        if not self.num_left:
            self.done(self)
