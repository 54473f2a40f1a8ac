"""Requests: every request of a scheduler, from its message to its one terminal message.

Whatever goes wrong with one of them ends that one. Which of them runs, and with which pages, is not decided here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from jaxserve.messages import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from jaxserve.scheduler.adapters import Adapters
from jaxserve.scheduler.grammar_queue import GrammarQueue
from jaxserve.scheduler.input_gate import InputGate
from jaxserve.scheduler.intake import Intake
from jaxserve.scheduler.meter import Meter
from jaxserve.scheduler.outputs import OutputSender
from jaxserve.scheduler.req import Req, RequestState, unexpected
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.step_log import Counters
from jaxserve.scheduler.waiting import WaitingQueue
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

ABORT_MESSAGE = "The request was aborted."
ABORT_MESSAGE_OF_WAITING = "Abort in waiting queue"  # SGLang's words, which clients look for
UNAVAILABLE = "ServiceUnavailableError"
QUEUE_FULL_MESSAGE = "The request queue is full."
GAVE_WAY_MESSAGE = "The request is aborted by a higher priority request."


class Requests:
    def __init__(
        self,
        intake: Intake,
        adapters: Adapters,
        compiling: GrammarQueue,
        waiting: WaitingQueue,
        residents: Residents,
        outputs: OutputSender,
        counters: Counters,
        wall_clock: Callable[[], float],
        meter: Meter,
    ) -> None:
        self._intake = intake
        self._adapters = adapters
        self._compiling = compiling
        self._waiting = waiting
        self._residents = residents
        self._outputs = outputs
        self._counters = counters
        self._wall_clock = wall_clock
        self._meter = meter
        self.gate = InputGate()
        self.is_closed = False  # no more are taken
        self.unavailable = ""  # why none are taken for now
        self.live: dict[str, Req] = {}  # by rid: compiling, waiting or resident, not finished

    def add(self, message: TokenizedGenerateReqInput) -> None:
        """Its sequences go into the waiting queue, or first to have their grammar compiled, or get their refusal. While
        input is blocked they are held."""
        for sequence in message.sequences():
            self._counters.num_requests += 1
            if self.gate.is_blocked:
                self._hold(sequence)
            else:
                self._admit(sequence)

    def add_batch(self, message: BatchTokenizedGenerateReqInput) -> None:
        for one in message.batch:
            self.add(one)

    def close(self) -> None:
        """No more are taken; those that are held are the last."""
        self._admit_all(self.gate.open())
        self.is_closed = True

    def release_held(self) -> None:
        """All replicas know that input is unblocked."""
        self._admit_all(self.gate.release())

    def _hold(self, message: TokenizedGenerateReqInput) -> None:
        reason, most = self._refusal(message), self._waiting.max_len
        if reason is None and most is not None and len(self.gate) >= most:  # they wait as those in the queue do
            reason = FinishReason.abort(QUEUE_FULL_MESSAGE, 503, UNAVAILABLE)
        if reason is None:
            self.gate.hold(message)
        else:
            self._reject(message, reason)

    def _admit_all(self, messages: Iterable[TokenizedGenerateReqInput]) -> None:
        for message in messages:
            self._admit(message)

    def _admit(self, message: TokenizedGenerateReqInput) -> None:
        reason = self._refusal(message) or self._take_in(message)
        if reason is not None:
            self._reject(message, reason)

    def _reject(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        self._counters.num_aborted += 1
        self._outputs.add_rejected(message.rid, len(message.input_ids), reason, message.route)

    def _refusal(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        if self.is_closed:
            return FinishReason.abort("The server is shutting down.", 503, UNAVAILABLE)
        if self.unavailable:
            return FinishReason.abort(self.unavailable, 503, UNAVAILABLE)
        if message.rid in self.live or message.rid in self.gate:
            logger.error("Request id %s is in use; the newcomer is refused.", message.rid)
            return FinishReason.abort(f"The request id {message.rid!r} is in use.", 400, "BadRequestError")
        most = self._waiting.max_len
        if most is not None and message.sampling_params.grammar is not None and len(self._compiling) > most:
            return FinishReason.abort(QUEUE_FULL_MESSAGE, 503, UNAVAILABLE)  # those being compiled wait too
        return None

    def _take_in(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        """Why that is not possible, if it is not."""
        try:
            req = self._intake.build(message)
            if req.sampling.grammar is None:
                self._waiting.push(req)
            else:
                self._compiling.push(req, req.sampling.grammar)
        except ValueError as err:
            return FinishReason.abort(str(err), 400, "BadRequestError")
        except Exception:
            logger.exception("Request %s could not be taken in.", message.rid)
            return unexpected("take the request in")
        self.live[req.rid] = req
        self._adapters.join(req)
        return None

    def collect_compiled(self) -> None:
        """Those whose grammar is ready go on to the waiting queue."""
        compiled = self._compiling.poll()
        for req in compiled.ready:
            req.times.grammar_ready_s = self._wall_clock()
            self._meter.grammar_compiled(req.times.grammar_ready_s - req.times.queue_entry_s)
            self._waiting.push(req)
        for req, reason in compiled.failed:
            self.finish(req, reason)

    def abort(self, rids: Sequence[str]) -> None:
        """Ends those that have not ended. What is held is taken in first, so that it ends as any."""
        self._admit_all(self.gate.take(rids))
        self._abort([self.live[rid] for rid in rids if rid in self.live])

    def abort_prefix(self, rid_prefix: str) -> None:
        """Ends every request whose rid begins so."""
        self._admit_all(self.gate.take_prefix(rid_prefix))
        self._abort([req for rid, req in self.live.items() if rid.startswith(rid_prefix)])

    def _abort(self, reqs: Sequence[Req]) -> None:
        waiting = [req for req in reqs if req.state is RequestState.WAITING]
        others = [req for req in reqs if req.state is not RequestState.WAITING]
        self.end(waiting, FinishReason.abort(ABORT_MESSAGE_OF_WAITING))
        self.end(others, FinishReason.abort(ABORT_MESSAGE))

    def refuse_beyond_limit(self, not_counted: Sequence[Req]) -> None:
        """After everybody was tried: only who has to wait takes a place in the queue."""
        refused = self._waiting.beyond_limit(not_counted)
        if refused:
            gave_way = self._waiting.gave_way(refused)
            self.end(list(gave_way), FinishReason.abort(GAVE_WAY_MESSAGE, 503, UNAVAILABLE))
            found_it_full = [req for req in refused if req not in gave_way]
            self.end(found_it_full, FinishReason.abort(QUEUE_FULL_MESSAGE, 503, UNAVAILABLE))
            self._outputs.flush()

    def end(self, reqs: Sequence[Req], reason: FinishReason) -> None:
        """In whatever state they are."""
        waiting = [req for req in reqs if req.state is RequestState.WAITING]
        if waiting:
            self._waiting.remove(waiting)
        self._compiling.remove([req for req in reqs if req.state is RequestState.COMPILING])
        for req in reqs:
            self.finish(req, reason)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """The one way out for every request that is in no queue: its terminal message, the books, and its row as soon as no
        step needs it."""
        del self.live[req.rid]
        self._adapters.leave(req)
        self._outputs.add_ended(req, reason)
        counters = self._counters
        if reason.type == "abort":
            counters.num_aborted += 1
        else:
            counters.num_finished += 1
            counters.prompt_tokens += req.prompt_len
            counters.cached_tokens += req.cached_len
        if req.lease is not None:
            self._residents.finish(req, reason)
        else:
            req.finish(reason)
