"""ResultProcessor: takes a step's sampled tokens in, ends requests that are over, and hands new tokens to the sender.

A result may name requests that ended after the step was launched (the overlap loop runs one step ahead): their token is dropped
here, and their row goes back when no other launched step names it.

A request ends, first rule that holds: NaN logits (abort), a stop token (eos or its own), a stop string or pattern, its length.
So a request whose last permitted token is a stop says "stop". min_new_tokens is kept by the sampler, which does not let stop
tokens out before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.runner import RunnerSpec, StepOutput
from jaxserve.scheduler.batch import ScheduleBatch
from jaxserve.scheduler.outputs import OutputSender
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.types import FinishReason

NAN_MESSAGE = "The model's logits were not numbers (NaN) for this request."


class ResultProcessor:
    def __init__(
        self,
        spec: RunnerSpec,
        table: RowTable,
        residents: Residents,
        outputs: OutputSender,
        finish: Callable[[Req, FinishReason], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._residents = residents
        self._outputs = outputs
        self._finish = finish
        self._wall_clock = wall_clock
        self._eos = np.array(spec.eos_token_ids, np.int32)

    def process(self, batch: ScheduleBatch, output: StepOutput) -> int:
        """Returns the number of tokens that went to requests."""
        rows, tokens = batch.rows, output.next_token_ids
        assert len(tokens) == len(rows), f"{len(tokens)} results for {len(rows)} rows"
        self._residents.processed(rows)
        wanted = self._table.alive[rows]
        if batch.items:
            self._note_prefilled(batch)
            wanted &= batch.sample
        picked = None if wanted.all() else np.flatnonzero(wanted)
        if picked is not None:
            rows, tokens = rows[picked], tokens[picked]
        if len(rows):
            rows = self._take_tokens(rows, tokens, picked, output)
        self._finish_without_tokens(batch)
        self._outputs.publish(rows)
        return len(tokens)

    def _take_tokens(self, rows: np.ndarray, tokens: np.ndarray, picked: np.ndarray | None, output: StepOutput) -> np.ndarray:
        """Books one token per row and ends requests; returns the rows that go on. `picked` are the rows' places in `output`."""
        table = self._table
        is_nan = tokens < 0
        if is_nan.any():
            for row in rows[is_nan].tolist():
                self._finish(table.req(row), FinishReason.abort(NAN_MESSAGE, 500, "InternalServerError"))
            good = np.flatnonzero(~is_nan)
            picked = good if picked is None else picked[good]
            rows, tokens = rows[good], tokens[good]
        known_len = table.known_len[rows]
        table.tokens[rows, known_len] = tokens
        known_len += 1
        table.known_len[rows] = known_len
        flags = table.flags[rows]
        if np.bitwise_or.reduce(flags, initial=0) & RowFlag.LOGPROBS:
            self._take_logprobs(rows, flags, picked, output)
        ends_by_token = self._ends_by_token(rows, tokens, flags)
        ends_by_length = known_len >= table.max_len[rows]
        suspects = ends_by_token | ends_by_length | ((flags & RowFlag.STOP_TEXT) != 0)
        if not suspects.any():
            return rows
        return self._end_requests(rows, tokens, np.flatnonzero(suspects), ends_by_token, ends_by_length)

    def _ends_by_token(self, rows: np.ndarray, tokens: np.ndarray, flags: np.ndarray) -> np.ndarray:
        ends = (tokens[:, None] == self._eos).any(axis=1) & ((flags & RowFlag.EOS_STOPS) != 0)
        with_own = np.flatnonzero(flags & RowFlag.OWN_STOP_IDS)
        if len(with_own):
            ends[with_own] |= (self._table.own_stop_ids[rows[with_own]] == tokens[with_own, None]).any(axis=1)
        return ends

    def _end_requests(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        suspects: np.ndarray,
        ends_by_token: np.ndarray,
        ends_by_length: np.ndarray,
    ) -> np.ndarray:
        goes_on = np.ones(len(rows), bool)
        for i in suspects.tolist():
            row = int(rows[i])
            req = self._table.req(row)
            reason: FinishReason | None
            if ends_by_token[i]:
                reason = FinishReason.stop(int(tokens[i]))
            else:
                reason = self._match_text(req, row)
            if reason is None and ends_by_length[i]:
                reason = FinishReason.length_limit(len(self._table.output_ids(row)))
            if reason is not None:
                self._finish(req, reason)
                goes_on[i] = False
        return rows[goes_on]

    def _match_text(self, req: Req, row: int) -> FinishReason | None:
        if req.stop_text is None:
            return None
        matched = req.stop_text.match(self._table.output_ids(row))
        return None if matched is None else FinishReason.stop(matched)

    def _take_logprobs(self, rows: np.ndarray, flags: np.ndarray, picked: np.ndarray | None, output: StepOutput) -> None:
        assert output.logprobs is not None, "a row wants logprobs and the step returned none"
        for i in np.flatnonzero(flags & RowFlag.LOGPROBS).tolist():
            buffer = self._table.req(int(rows[i])).logprobs
            assert buffer is not None
            at = i if picked is None else int(picked[i])
            top_ids = None if output.top_ids is None else output.top_ids[at]
            top_logprobs = None if output.top_logprobs is None else output.top_logprobs[at]
            buffer.append(float(output.logprobs[at]), top_ids, top_logprobs)

    def _note_prefilled(self, batch: ScheduleBatch) -> None:
        now = self._wall_clock()
        for item in batch.items:
            if item.is_last and not item.req.first_token_s:
                item.req.first_token_s = now

    def _finish_without_tokens(self, batch: ScheduleBatch) -> None:
        """max_new_tokens = 0: the prompt was computed (and is cached now), nothing more was asked for."""
        for item in batch.items:
            if item.is_last and item.req.max_new_tokens == 0 and not item.req.is_finished:
                self._finish(item.req, FinishReason.length_limit(0))
