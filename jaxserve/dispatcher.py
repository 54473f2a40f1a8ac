"""Dispatcher: which function takes a message. One dict lookup on the message's type; nothing else decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.messages import Message

logger = logging.getLogger(__name__)


class Dispatcher:
    def __init__(self, handlers: Mapping[type[Message], Callable[[Any], None]]) -> None:
        self._handlers = dict(handlers)

    def __call__(self, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.error("No handler for a message of type %s; it was dropped.", type(message).__name__)
            return
        handler(message)
