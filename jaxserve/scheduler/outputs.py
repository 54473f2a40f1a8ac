"""OutputSender: what goes to the detokenizer, and when.

Running requests are looked at as rows of NumPy arrays: a row is due when it has as many outputs as its interval says. Requests
that end are snapshots taken while their tokens are still in the row table. One message per processed step carries both; where
requests have several routes, one for each. Python work per request is done only for its first message, for logprobs, and at its
end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jaxserve.messages import SCHEDULER, BatchTokenIDOut, HiddenStates, InputLogprobs, Route, TokenLogprobs, WorkerAddress
from jaxserve.scheduler.req import NO_TOKENS, Req
from jaxserve.scheduler.rows import RowFlag, RowTable, decode_flags
from jaxserve.timeline import RequestTimes
from jaxserve.types import FinishReason

_MORE_THAN_TOKENS = RowFlag.UNANNOUNCED | RowFlag.LOGPROBS | RowFlag.TOKEN_STATES


@dataclasses.dataclass(slots=True)
class _Ended:
    """The last message of one request."""

    rid: str
    route: Route
    token_ids: np.ndarray
    decode_flags: int
    prompt_len: int
    output_len: int
    cached_len: int
    reason: FinishReason
    times: RequestTimes
    logprobs: TokenLogprobs | None = None
    hidden_states: HiddenStates | None = None
    experts: np.ndarray | None = None
    pooled: np.ndarray | None = None
    unannounced: Req | None = None  # set if no message went out before


class OutputSender:
    def __init__(
        self,
        table: RowTable,
        send: Callable[[BatchTokenIDOut], None],
        wall_clock: Callable[[], float],
        weight_version: str = "",
        num_draft_tokens: int = 1,
        source: WorkerAddress = WorkerAddress(SCHEDULER),
    ) -> None:
        """`weight_version` names the weights that what is sent was computed with; it may be changed."""
        self._table = table
        self._drafts_per_step = num_draft_tokens - 1
        self._source = source
        self._send = send
        self._wall_clock = wall_clock
        self.weight_version = weight_version
        self._ended: list[_Ended] = []

    def add_ended(self, req: Req, reason: FinishReason) -> None:
        """The request's last message, with all tokens not sent yet. Call it before its row is released."""
        if req.lease is None:
            output_ids, logprobs, sent_len = req.output_ids, req.output_logprobs, req.sent_len
        else:
            output_ids, logprobs = self._table.output_ids(req.row), self._table.output_logprobs(req.row)
            sent_len = int(self._table.sent_len[req.row])
        self._ended.append(
            _Ended(
                rid=req.rid,
                route=req.route,
                token_ids=output_ids[sent_len:].copy(),
                decode_flags=decode_flags(req),
                prompt_len=req.prompt_len,
                output_len=len(output_ids),
                cached_len=req.cached_len,
                reason=reason,
                times=self._times(req),
                logprobs=req.logprobs.take(logprobs[sent_len:].copy()) if req.logprobs is not None else None,
                hidden_states=req.hidden_states.take() if req.hidden_states is not None else None,
                experts=req.experts.take() if req.experts is not None else None,
                pooled=req.vectors.take() if req.vectors is not None and reason.type != "abort" else None,
                unannounced=None if req.announced else req,
            )
        )

    def add_rejected(self, rid: str, prompt_len: int, reason: FinishReason, route: Route) -> None:
        """A message that never became a request."""
        now = self._wall_clock()
        times = RequestTimes(queue_entry_s=now, finished_s=now)
        self._ended.append(_Ended(rid, route, NO_TOKENS, 0, prompt_len, 0, 0, reason, times))

    def flush(self) -> None:
        """Sends what ended outside of a step's result."""
        self.publish(NO_TOKENS)

    def publish(self, rows: np.ndarray) -> None:
        """One message, for each route, for those of `rows` (live, with new tokens) that are due and for all that ended."""
        table = self._table
        due = rows
        if len(rows):
            output_len = table.known_len[rows] - table.prompt_len[rows]
            is_due = (output_len >= table.send_at_len[rows]) & (output_len > table.sent_len[rows])
            due = rows if is_due.all() else rows[is_due]
        self._publish(due)

    def publish_unsent(self, rows: np.ndarray) -> None:
        """The same for all that have tokens which were not sent, due or not."""
        output_len = self._table.known_len[rows] - self._table.prompt_len[rows]
        self._publish(rows[output_len > self._table.sent_len[rows]])

    def _publish(self, due: np.ndarray) -> None:
        if not len(due) and not self._ended:
            return
        ended, self._ended = self._ended, []
        for route, rows_there, ended_there in self._by_route(due, ended):
            message = self._message_of_rows(rows_there, route)
            if ended_there:
                _append_ended(message, ended_there)
            self._send(message)

    def _by_route(self, due: np.ndarray, ended: list[_Ended]) -> Iterator[tuple[Route, np.ndarray, list[_Ended]]]:
        """What goes where."""
        ended_of: dict[Route, list[_Ended]] = {}
        for last in ended:
            ended_of.setdefault(last.route, []).append(last)
        routes = self._table.routes
        if len(routes) == 1 and len(due):
            yield routes[0], due, ended_of.pop(routes[0], [])
        elif len(due):
            of_row = self._table.route[due]
            for number in np.flatnonzero(np.bincount(of_row)).tolist():
                yield routes[number], due[of_row == number], ended_of.pop(routes[number], [])
        for route, others in ended_of.items():
            yield route, NO_TOKENS, others

    def _message_of_rows(self, rows: np.ndarray, route: Route) -> BatchTokenIDOut:
        table, rids = self._table, self._table.rids
        prompt_len, known_len = table.prompt_len[rows], table.known_len[rows]
        output_len = known_len - prompt_len
        sent_len = table.sent_len[rows]
        counts = output_len - sent_len
        message = BatchTokenIDOut(
            rids=[rids[row] for row in rows.tolist()],
            token_ids=_last_tokens(table.tokens, rows, known_len, counts),
            token_counts=counts,
            decode_flags=table.decode_flags[rows],
            prompt_tokens=prompt_len,
            completion_tokens=output_len,
            cached_tokens=table.cached_len[rows],
            source=self._source,
            route=route,
            weight_version=self.weight_version,
        )
        table.sent_len[rows] = output_len
        table.send_at_len[rows] = output_len + table.send_every[rows]
        flags = table.flags[rows]
        for i in np.flatnonzero(flags & _MORE_THAN_TOKENS).tolist():
            req = table.req(int(rows[i]))
            if not req.announced:
                _announce(req, i, message)
                table.flags[rows[i]] &= ~np.uint16(RowFlag.UNANNOUNCED)
            if req.logprobs is not None:
                message.logprobs[i] = req.logprobs.take(table.output_logprobs(req.row, int(sent_len[i])).copy())
            if req.hidden_states is not None and (states := req.hidden_states.take()) is not None:
                message.hidden_states[i] = states
            if req.experts is not None and (experts := req.experts.take()) is not None:
                message.experts[i] = experts
        return message

    def _times(self, req: Req) -> RequestTimes:
        verify_steps, accepted_drafts = req.verify_steps, req.accepted_drafts
        if req.lease is not None:
            verify_steps, accepted_drafts = int(self._table.verify_steps[req.row]), int(self._table.accepted_drafts[req.row])
        times = req.times
        times.ended(self._wall_clock())
        times.verify_steps, times.accepted_drafts = verify_steps, accepted_drafts
        times.proposed_drafts = verify_steps * self._drafts_per_step
        return times


def _append_ended(message: BatchTokenIDOut, ended: list[_Ended]) -> None:
    first = len(message.rids)
    for i, last in enumerate(ended, first):
        message.rids.append(last.rid)
        message.finished[i] = last.reason
        message.times[i] = last.times
        if last.logprobs is not None:
            message.logprobs[i] = last.logprobs
        if last.hidden_states is not None:
            message.hidden_states[i] = last.hidden_states
        if last.experts is not None:
            message.experts[i] = last.experts
        if last.pooled is not None:
            message.pooled[i] = last.pooled
        if last.unannounced is not None:
            _announce(last.unannounced, i, message)
    message.token_ids = np.concatenate([message.token_ids, *(last.token_ids for last in ended)])
    for field, dtype, values in (
        ("token_counts", np.int32, [len(last.token_ids) for last in ended]),
        ("decode_flags", np.uint8, [last.decode_flags for last in ended]),
        ("prompt_tokens", np.int32, [last.prompt_len for last in ended]),
        ("completion_tokens", np.int32, [last.output_len for last in ended]),
        ("cached_tokens", np.int32, [last.cached_len for last in ended]),
    ):
        setattr(message, field, np.concatenate([getattr(message, field), np.array(values, dtype)]))


def _announce(req: Req, index: int, message: BatchTokenIDOut) -> None:
    req.announced = True
    message.prompt_tails[index] = req.prompt_tail
    if req.sampling.stop:
        message.stops[index] = req.sampling.stop
    if req.sampling.stop_regex:
        message.stop_patterns[index] = req.sampling.stop_regex
    if req.prompt_logprobs is not None:
        token_ids = req.prompt_ids[req.prompt_logprobs.start :]
        message.input_logprobs[index] = InputLogprobs(token_ids=token_ids, logprobs=req.prompt_logprobs.take())


def _last_tokens(tokens: np.ndarray, rows: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The `counts[i]` tokens of row rows[i] before position ends[i], one row after the other."""
    if (counts == 1).all():
        return tokens[rows, ends - 1]
    offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return tokens[np.repeat(rows, counts), np.repeat(ends - counts, counts) + offset]
