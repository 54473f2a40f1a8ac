"""configure_logging: what is logged and dumped of requests, and how verbose the logs are, changed while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from jaxserve.config import LOG_LEVELS
from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER, TOKENIZER
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct, Route

_PACKAGE = "jaxserve"


class ConfigureLoggingReq(ControlStruct):
    """Changes what is logged and dumped of requests; what is absent stays as it is. An empty folder ends its dumps."""

    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None
    log_requests_format: Literal["text", "json"] | None = None
    log_level: str | None = None
    dump_requests_folder: str | None = None
    dump_requests_threshold: int | None = None
    crash_dump_folder: str | None = None


class ConfigureLoggingReqOutput(msgspec.Struct):
    log_level: str  # as it is now


class KeepsJournal(Protocol):
    """The TokenizerManager's part."""

    def configure_journal(self, changes: dict[str, Any]) -> None:
        """Raises ValueError, and changes nothing, if they cannot be."""


def configure(manager: KeepsJournal, request: ConfigureLoggingReq) -> ConfigureLoggingReqOutput:
    if request.log_level is not None and request.log_level.lower() not in LOG_LEVELS:
        raise ControlError(f"log_level must be one of {', '.join(LOG_LEVELS)}; got {request.log_level!r}.")
    if request.dump_requests_threshold is not None and request.dump_requests_threshold < 1:
        raise ControlError(f"dump_requests_threshold must be at least 1, got {request.dump_requests_threshold}.")
    changes = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
    changes.pop("log_level", None)
    try:
        manager.configure_journal(changes)
    except ValueError as error:
        raise ControlError(str(error)) from error
    return ConfigureLoggingReqOutput(set_level(request))


def set_level(request: ConfigureLoggingReq) -> str:
    ours = logging.getLogger(_PACKAGE)
    if request.log_level is not None:
        ours.setLevel(request.log_level.upper())
    return logging.getLevelName(ours.getEffectiveLevel()).lower()


def configure_worker(component: object, request: ConfigureLoggingReq) -> ConfigureLoggingReqOutput:
    return ConfigureLoggingReqOutput(set_level(request))


def as_text(replies: Sequence[ConfigureLoggingReqOutput]) -> str:
    return f"Logging configured; the level is {replies[0].log_level}.\n"


CONTROL = Control(
    name="configure_logging",
    request=ConfigureLoggingReq,
    reply=ConfigureLoggingReqOutput,
    handlers={TOKENIZER: configure, FRONT: configure, SCHEDULER: configure_worker, DETOKENIZER: configure_worker},
    lasting="each",
    route=Route("/configure_logging", ("POST", "GET"), render=as_text),
)
