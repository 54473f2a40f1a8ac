"""ControlDesk: a worker's control requests, from the message to the one reply each of them gets.

Whatever goes wrong in a handler becomes its reply; the worker goes on. A handler that waits is asked again in every round of
the worker's loop (`serve`) until it is done.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator

import msgspec

from jaxserve.commands import CommandError
from jaxserve.messages import ControlReply, ControlRequest, WorkerAddress, pack, unpack
from jaxserve.scheduler.control.declaration import ControlError, Reply
from jaxserve.scheduler.control.registry import controls

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Running:
    message: ControlRequest
    handling: Generator[None, None, Reply]


class ControlDesk:
    def __init__(self, component: object, worker: WorkerAddress, send: Callable[[ControlReply], None]) -> None:
        """`component` is what the handlers of this kind of worker are given."""
        self._component = component
        self._worker = worker
        self._send = send
        self._waiting: list[_Running] = []

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def receive(self, message: ControlRequest) -> None:
        self._advance(_Running(message, self._handle(message)))

    def serve(self) -> None:
        """Asks those that wait whether they can reply now."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._advance(one)

    def _handle(self, message: ControlRequest) -> Generator[None, None, Reply]:
        control = controls().get(message.name)
        handler = None if control is None else control.handlers.get(self._worker.kind)
        if control is None or handler is None:
            raise ControlError(f"The {self._worker} has no control request {message.name!r}.", 404)
        reply = handler(self._component, unpack(message.body, control.request))
        return (yield from reply) if isinstance(reply, Generator) else reply

    def _advance(self, running: _Running) -> None:
        """Goes as far as a request can go now."""
        name = running.message.name
        try:
            next(running.handling)
        except StopIteration as end:
            self._reply(running, end.value)
        except ControlError as error:
            self._refuse(running, str(error), error.status_code)
        except CommandError as error:
            self._refuse(running, str(error), 400)
        except msgspec.ValidationError as error:
            self._refuse(running, f"{name} is wrong: {error}", 400)
        except Exception as error:
            logger.exception("The control request %s failed.", name)
            self._refuse(running, f"{name} failed in the {self._worker}: {type(error).__name__}: {error}", 500)
        else:
            self._waiting.append(running)

    def _reply(self, running: _Running, reply: Reply) -> None:
        try:
            body = pack(reply)
        except (TypeError, ValueError) as error:
            logger.exception("The reply to %s cannot be sent.", running.message.name)
            return self._refuse(running, f"The reply to {running.message.name} cannot be sent: {error}", 500)
        self._send(ControlReply(request_id=running.message.request_id, worker=self._worker, body=body))
        return None

    def _refuse(self, running: _Running, error: str, status_code: int) -> None:
        request_id = running.message.request_id
        self._send(ControlReply(request_id=request_id, worker=self._worker, error=error, status_code=status_code))
