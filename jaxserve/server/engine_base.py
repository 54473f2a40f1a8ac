"""What the parts of the Engine's interface have in common: a pipeline, and a loop that it runs on."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from jaxserve.config import ServerArgs
from jaxserve.server.pipeline import Pipeline

T = TypeVar("T")


class EngineBase(abc.ABC):
    server_args: ServerArgs
    _pipeline: Pipeline
    _closed: bool

    @abc.abstractmethod
    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work, done on the engine's loop, returns or raises."""

    @abc.abstractmethod
    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, from any event loop."""

    @abc.abstractmethod
    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Has it done there."""

    @abc.abstractmethod
    def _with_reason(self) -> contextlib.AbstractContextManager[None]:
        """Why a worker died, for whoever is told that it has."""
