"""ControlClient: asks workers and gathers their replies, one per worker. Works on the main process's asyncio loop.

A replica that is started again is told what has been asked before, as far as it lasts (`Control.lasting`), before it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from jaxserve.messages import SCHEDULER, TOKENIZER, ControlReply, ControlRequest, WorkerAddress, pack, unpack
from jaxserve.scheduler.control.declaration import Control, ControlError, ControlStruct
from jaxserve.scheduler.control.registry import control_of
from jaxserve.server.requests import ERR_TYPES, RequestError
from jaxserve.server.worker_link import WorkerLink

logger = logging.getLogger(__name__)

# How long a worker may take to answer, beyond what the request itself allows it to wait.
ANSWER_TIMEOUT_S = 30.0
# Lasting requests that are remembered; equal ones count once, as do those about one thing.
_MOST_LASTING = 4096


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
        self._lasting: list[tuple[int, ControlStruct]] = []  # that all workers have carried out, numbered in that order from 1
        self._num_lasting = 0  # there have ever been
        self._lasting_open = 0  # that are being carried out
        self._lasting_settled = asyncio.Event()

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
        if control.asked_as is not None:
            return await self._ask_as(control.asked_as, request)
        workers = [worker for worker in self._link.workers if worker.kind in control.handlers]
        if not workers:
            if SCHEDULER in control.handlers:
                raise _refusal("No replica is serving at the moment.", 503)
            return [local]
        with self._lasts(control):
            replies = await self._ask_workers(control.name, body, workers, _timeout_s(control, request))
            _raise_refusal(replies)
            answers = [unpack(reply.body, control.reply) for reply in replies]
            if not _tell_apart(replies, answers):
                self._remember(control, request)
                if control.completed is not None:
                    control.completed(self._tokenizer_manager, request, answers)
                if control.then is not None:
                    await self.ask(control.then())
        return answers

    async def _ask_as(
        self, asked_as: Callable[[Any, Any], AbstractAsyncContextManager[ControlStruct]], request: ControlStruct
    ) -> list[Any]:
        """`Control.asked_as`. Errors as of `ask`."""
        try:
            async with asked_as(self._tokenizer_manager, request) as other:
                return await self.ask(other)
        except ControlError as error:
            raise _refusal(str(error), error.status_code) from error

    async def bring_up_to_date(self, worker: WorkerAddress, num_told: int = 0) -> int:
        """Asks a new worker what the others were asked, but for the first `num_told`, which it knows. Returns how many it knows
        now: until anything else is awaited, it is as the others are. Raises RequestError if it does not answer."""
        while self._lasting_open or num_told < self._num_lasting:
            while self._lasting_open:
                self._lasting_settled.clear()
                await self._lasting_settled.wait()
            new = [request for number, request in self._lasting if number > num_told]
            num_told = self._num_lasting
            for request in new:
                control = control_of(type(request))
                if worker.kind not in control.handlers:
                    continue
                timeout_s = _timeout_s(control, request)
                (reply,) = await self._ask_workers(control.name, pack(request), [worker], timeout_s)
                if reply.error:  # such as resuming what this one never released
                    logger.info("The new %s did not need %s: %s", worker, control.name, reply.error)
        return num_told

    @contextlib.contextmanager
    def _lasts(self, control: Control) -> Iterator[None]:
        """Around carrying it out."""
        self._lasting_open += control.lasting is not None
        try:
            yield
        finally:
            self._lasting_open -= control.lasting is not None
            self._lasting_settled.set()

    def _remember(self, control: Control, request: ControlStruct) -> None:
        if control.lasting is None:
            return
        self._num_lasting += 1

        def is_void(old: ControlStruct) -> bool:
            if control.about is not None and (about := control_of(type(old)).about) is not None:
                return about(old) == control.about(request)
            return old == request or (control.lasting == "newest" and type(old) is type(request))

        kept = [(number, old) for number, old in self._lasting if not is_void(old)]
        self._lasting = [*kept, (self._num_lasting, request)][-_MOST_LASTING:]

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

    def worker_gone(self, worker: WorkerAddress, message: str) -> None:
        """It answers nothing any more; what the others answer counts."""
        for question in self._open.values():
            if worker not in question.missing:
                continue
            question.missing.remove(worker)
            if question.missing or question.answered.done():
                continue
            if question.replies:
                question.answered.set_result(None)
            else:
                question.answered.set_exception(_refusal(message, 503))

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


def _timeout_s(control: Control, request: ControlStruct) -> float | None:
    return None if control.takes_long else ANSWER_TIMEOUT_S + getattr(request, "timeout_s", 0.0)


def _raise_refusal(replies: Sequence[ControlReply]) -> None:
    """If one refuses. Replicas that could not do alike are told apart."""
    refused = [reply for reply in replies if reply.error]
    if not refused:
        return
    message = _told_apart(refused[0], refused[0].error, [reply for reply in replies if not reply.error])
    raise _refusal(message, refused[0].status_code)


def _tell_apart(replies: Sequence[ControlReply], answers: Sequence[Any]) -> bool:
    """Whether somebody has failed. If others have not, the message of each that has says so."""
    failed = [getattr(answer, "success", True) is False for answer in answers]
    done = [reply for reply, has_failed in zip(replies, failed, strict=True) if not has_failed]
    for reply, answer, has_failed in zip(replies, answers, failed, strict=True):
        if has_failed:
            answer.message = _told_apart(reply, answer.message, done)
    return any(failed)


def _told_apart(reply: ControlReply, message: str, done: Sequence[ControlReply]) -> str:
    """Whose it is, if others have done what this one has not."""
    return f"{reply.worker}: {message} Done by: {', '.join(str(one.worker) for one in done)}." if done else message


def _refusal(message: str, status_code: int) -> RequestError:
    return RequestError(message, status_code, ERR_TYPES.get(status_code, "BadRequestError"))
