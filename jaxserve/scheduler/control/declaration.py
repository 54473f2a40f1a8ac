"""What a control request is: its struct, its reply, who handles it, and how HTTP and the Engine show it.

A file of this package declares one, as its `CONTROL`. Everything else follows from that: the HTTP route
(`jaxserve.server.control.endpoints`), the method of the Engine (`jaxserve.server.control.engine_methods`), the way to the
workers that handle it and back (`jaxserve.server.control.client`). No HTTP here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import msgspec

# A handler gets its component (the Scheduler, the Detokenizer, the TokenizerManager) and the request. It returns the reply; one
# that must wait is a generator that yields until it can return it. It runs between two steps and must not block.
Reply = msgspec.Struct
Handler = Callable[[Any, Any], Reply | Generator[None, None, Reply]]


class ControlError(Exception):
    """A control request that cannot be served: one sentence for whoever asked."""

    def __init__(self, message: str, status_code: int = 400) -> None:
        super().__init__(message)
        self.status_code = status_code


class ControlStruct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of requests. One that may wait in the worker has a field `timeout_s`: so long its asker waits longer."""


def first_failure(replies: Sequence[Any]) -> Any:
    """Of the replies of several workers the one to show: the first that says success=False, else the first."""
    return next((reply for reply in replies if getattr(reply, "success", True) is False), replies[0])


def each_message(replies: Sequence[Any]) -> str:
    """A line for what each worker says; what several say stands there once."""
    return "".join(f"{message}\n" for message in dict.fromkeys(reply.message for reply in replies))


@dataclasses.dataclass(frozen=True)
class Route:
    """A reply with success=False has status 400."""

    path: str
    methods: tuple[str, ...] = ("POST",)  # the first is the documented one
    fields_from: Literal["body", "query"] = "body"  # an absent body means the defaults
    needs_admin_key: bool = True
    # What is shown of the workers' replies: a string as plain text, anything else as JSON.
    render: Callable[[Sequence[Any]], Any] = first_failure


@dataclasses.dataclass(frozen=True)
class Control:
    name: str  # on the wire, and of the Engine's method
    request: type[ControlStruct]  # its docstring is what /docs shows
    reply: type[msgspec.Struct]
    # By kind of worker. The TokenizerManager's runs first, and whatever it raises keeps the request from the others.
    handlers: Mapping[str, Handler]
    route: Route | None = None
    # Of one that only the TokenizerManager handles: given it and the request, a context in which another request is asked
    # instead, whose declaration holds from then on. It may await, as handlers may not.
    asked_as: Callable[[Any, Any], AbstractAsyncContextManager[ControlStruct]] | None = None
    takes_long: bool = False  # as long as loading a model may: whoever asks waits until it is answered or the worker is gone
    # The TokenizerManager's part once every worker has carried it out, given the manager, the request and the replies. Not
    # called if one refuses, fails, or says success=False.
    completed: Callable[[Any, Any, Sequence[Any]], None] | None = None
    # A request without a route that all workers are asked when every one has carried out this one: a barrier.
    then: type[ControlStruct] | None = None
    # What a scheduler that is started again must be told of what was asked before, to be as the others are: nothing (None), or
    # all that was asked in order (each), or the newest alone, which makes the others void.
    lasting: Literal["each", "newest"] | None = None
    # What a lasting request is about: the newest about it, of whichever kind, makes those before void.
    about: Callable[[Any], Hashable] | None = None
    result: Callable[[Any], Any] = lambda reply: reply  # of the reply what the Engine's method returns
    has_method: bool = True  # of the Engine; else it has one that does more
    has_async_method: bool = False  # the same from any event loop, called async_ and the name
