"""ControlClient: asks workers and gathers their replies, one per worker. Works on the main process's asyncio loop."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from jaxserve.messages import TOKENIZER, ControlReply, ControlRequest, WorkerAddress, pack, unpack
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct
from jaxserve.scheduler.control.registry import control_of
from jaxserve.server.requests import ERR_TYPES, RequestError
from jaxserve.server.worker_link import WorkerLink

# How long a worker may take to answer, beyond what the request itself allows it to wait.
ANSWER_TIMEOUT_S = 30.0


@dataclasses.dataclass
class _Question:
    missing: set[WorkerAddress]
    answered: asyncio.Future[None]
    replies: list[ControlReply] = dataclasses.field(default_factory=list)
    took: Callable[[ControlReply], None] | None = None  # told of each as it comes


class ControlClient:
    def __init__(self, tokenizer_manager: object, link: WorkerLink) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._link = link
        self._open: dict[str, _Question] = {}

    async def ask(self, request: ControlStruct) -> list[Any]:
        """The replies of all workers that handle it, by rank. Raises RequestError if one of them refuses or fails."""
        control = control_of(type(request))
        try:
            body = pack(request)
            unpack(body, control.request)  # structs made in Python were never checked
            local = self._handle_here(control, request)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:  # the latter: no message can hold it
            raise RequestError(f"{control.name} is wrong: {error}") from error
        except ControlError as error:
            raise _refusal(str(error), error.status_code) from error
        workers = [worker for worker in self._link.workers if worker.kind in control.handlers]
        if not workers:
            return [local]
        timeout_s = None if control.takes_long else ANSWER_TIMEOUT_S + getattr(request, "timeout_s", 0.0)
        replies = await self._ask_workers(control.name, body, workers, timeout_s)
        for reply in replies:
            if reply.error:
                raise _refusal(reply.error, reply.status_code)
        answers = [unpack(reply.body, control.reply) for reply in replies]
        if control.completed is not None and all(getattr(answer, "success", True) for answer in answers):
            control.completed(self._tokenizer_manager, request, answers)
        return answers

    async def tell_each(self, request: ControlStruct, answered: Callable[[WorkerAddress, Any], None]) -> None:
        """Asks the workers, and passes on each answer when it comes. Returns when there are all; who refuses is left out.
        Raises RequestError if one does not answer."""
        control = control_of(type(request))

        def took(reply: ControlReply) -> None:
            if not reply.error:
                answered(reply.worker, unpack(reply.body, control.reply))

        workers = [worker for worker in self._link.workers if worker.kind in control.handlers]
        await self._ask_workers(control.name, pack(request), workers, ANSWER_TIMEOUT_S, took)

    def receive(self, reply: ControlReply) -> None:
        question = self._open.get(reply.request_id)
        if question is None or reply.worker not in question.missing:
            return  # whoever asked has given up
        question.missing.remove(reply.worker)
        question.replies.append(reply)
        if question.took is not None:
            question.took(reply)
        if not question.missing and not question.answered.done():
            question.answered.set_result(None)

    def fail_all(self, message: str) -> None:
        for question in self._open.values():
            if not question.answered.done():
                question.answered.set_exception(_refusal(message, 503))

    def _handle_here(self, control: Control, request: ControlStruct) -> Any:
        handler = control.handlers.get(TOKENIZER)
        return None if handler is None else handler(self._tokenizer_manager, request)

    async def _ask_workers(
        self,
        name: str,
        body: msgspec.Raw,
        workers: list[WorkerAddress],
        timeout_s: float | None,
        took: Callable[[ControlReply], None] | None = None,
    ) -> list[ControlReply]:
        question = _Question(set(workers), asyncio.get_running_loop().create_future(), took=took)
        message = ControlRequest(request_id=uuid.uuid4().hex, name=name, body=body)
        self._open[message.request_id] = question
        try:
            for worker in workers:
                self._link.send(worker, message)
            await asyncio.wait_for(question.answered, timeout_s)
        except TimeoutError:
            silent = ", ".join(map(str, sorted(question.missing)))
            raise _refusal(f"{name} was not answered within {timeout_s:g} s by: {silent}.", 503) from None
        finally:
            del self._open[message.request_id]
        return sorted(question.replies, key=lambda reply: workers.index(reply.worker))


def _refusal(message: str, status_code: int) -> RequestError:
    return RequestError(message, status_code, ERR_TYPES.get(status_code, "BadRequestError"))
