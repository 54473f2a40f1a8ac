"""Dispatcher: which function takes a message. One dict from the message's type; nothing else decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.messages import Message

logger = logging.getLogger(__name__)


class Dispatcher:
    def __init__(self, handlers: Mapping[type[Message], Callable[[Any], None]]) -> None:
        self._handlers = dict(handlers)

    def dispatch(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.error("A %s arrived, and the scheduler has no use for it.", type(message).__name__)
            return
        handler(message)
