"""close_session: the tokens of a session are forgotten; requests of it that run go on to their end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxserve.messages import TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route
from jaxserve.scheduler.control.open_session import HasSessions


class CloseSessionReqInput(ControlStruct):
    """Closes a session. Requests of it that run go on to their end."""

    session_id: str


class CloseSessionReqOutput(msgspec.Struct):
    pass


def close_session(manager: HasSessions, request: CloseSessionReqInput) -> CloseSessionReqOutput:
    try:
        manager.sessions.close(request.session_id)
    except ValueError as error:
        raise ControlError(str(error)) from error
    return CloseSessionReqOutput()


def as_nothing(replies: Sequence[CloseSessionReqOutput]) -> str:
    return ""


CONTROL = Control(
    name="close_session",
    request=CloseSessionReqInput,
    reply=CloseSessionReqOutput,
    handlers={TOKENIZER: close_session},
    route=Route("/close_session", ("POST", "GET"), needs_admin_key=False, render=as_nothing),
    result=lambda reply: None,
)
