"""open_session: a conversation whose tokens the server keeps (`jaxserve.server.sessions`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from jaxserve.messages import TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route


class HasSessions(Protocol):
    """The TokenizerManager's part."""

    @property
    def sessions(self) -> Any: ...


class OpenSessionReqInput(ControlStruct):
    """Opens a session and answers with its id. A prompt of it may have up to `capacity_of_str_len` tokens. `streaming`: turns
    are only appended, one at a time. After `timeout` seconds without a request it is closed."""

    capacity_of_str_len: Annotated[int, msgspec.Meta(ge=1)]
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    streaming: bool = False
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None


class OpenSessionReqOutput(msgspec.Struct):
    session_id: str


def open_session(manager: HasSessions, request: OpenSessionReqInput) -> OpenSessionReqOutput:
    try:
        session_id = manager.sessions.open(
            request.capacity_of_str_len, request.session_id, appends_only=request.streaming, timeout_s=request.timeout
        )
    except ValueError as error:
        raise ControlError(str(error)) from error
    return OpenSessionReqOutput(session_id)


def as_json_text(replies: Sequence[OpenSessionReqOutput]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(replies[0].session_id))


CONTROL = Control(
    name="open_session",
    request=OpenSessionReqInput,
    reply=OpenSessionReqOutput,
    handlers={TOKENIZER: open_session},
    route=Route("/open_session", ("POST", "GET"), needs_admin_key=False, render=as_json_text),
    result=lambda reply: reply.session_id,
)
