"""ResultProcessor: takes a step's sampled tokens in, ends requests that are over, and hands new tokens to the sender.

A result may name requests that ended after the step was launched (the overlap loop runs one step ahead): their token is dropped
here, and their row goes back when no other launched step names it.

A request ends, first rule that holds: no token could be sampled (abort), a stop token (eos or its own), a stop string or
pattern, the end of its grammar, its length.
So a request whose last permitted token is a stop says "stop". min_new_tokens is kept by the sampler, which does not let stop
tokens out before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from jaxserve.runner import NO_CANDIDATES, RunnerSpec, StepInput, StepOutput
from jaxserve.scheduler.batch import ScheduleBatch
from jaxserve.scheduler.constraints import Constraints
from jaxserve.scheduler.jumps import Jumps
from jaxserve.scheduler.outputs import OutputSender
from jaxserve.scheduler.req import Req, unexpected
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

# Requests whose newest token is looked at one by one.
_LOOKED_AT = RowFlag.STOP_TEXT | RowFlag.GRAMMAR | RowFlag.THINKING | RowFlag.RULES
# Requests to whose tokens more belongs than numbers of their own.
_ANSWERED = RowFlag.TOP_LOGPROBS | RowFlag.SCORES | RowFlag.TOKEN_STATES

_BROKEN_LOGITS = "The model's logits were not numbers (NaN or infinite) for this request."
_NO_CANDIDATES = (
    "No token is left to sample: the request's grammar, logit processors, logit_bias and min_new_tokens rule out all of them."
)
_BROKEN_VECTOR = "The model's vector was not of numbers (NaN or infinite) for this request."
_RULING_OUT = RowFlag.GRAMMAR | RowFlag.ADJUSTING | RowFlag.RULES | RowFlag.PROCESSOR


class ResultProcessor:
    def __init__(
        self,
        *,
        spec: RunnerSpec,
        table: RowTable,
        residents: Residents,
        outputs: OutputSender,
        constraints: Constraints,
        jumps: Jumps,
        finish: Callable[[Req, FinishReason], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._residents = residents
        self._outputs = outputs
        self._finish = finish
        self._wall_clock = wall_clock
        self._eos = np.array(spec.eos_token_ids, np.int32)
        self._num_draft_tokens = spec.num_draft_tokens
        self._constraints = constraints
        self._jumps = jumps
        self._num_verified = 0  # rows times steps that verified drafts, and the drafts accepted in them
        self._num_accepted_drafts = 0

    @property
    def avg_accept_len(self) -> float | None:
        """Tokens gained per row and step that verified drafts; None if there was none."""
        return 1 + self._num_accepted_drafts / self._num_verified if self._num_verified else None

    @property
    def _accept_rate(self) -> float | None:
        """Of the drafts that could have been accepted."""
        most = self._num_verified * (self._num_draft_tokens - 1)
        return self._num_accepted_drafts / most if most else None

    def counts(self) -> dict[str, float | None]:
        return {
            "avg_spec_accept_length": self.avg_accept_len,
            "num_spec_verify_calls": self._num_verified,
            "num_spec_accepted_tokens": self._num_accepted_drafts,
            "spec_accept_rate": self._accept_rate,
        }

    def process(self, batch: ScheduleBatch, step: StepInput, output: StepOutput) -> int:
        """Returns the number of tokens that went to requests."""
        rows, tokens = batch.rows, output.token_ids
        assert len(tokens) == len(rows), f"{len(tokens)} results for {len(rows)} rows"
        if tokens.shape[1] > 1:
            self._count_accepted(step, output)
        if output.drafts is not None:
            self._table.drafts[rows] = output.drafts
        self._residents.processed(rows)
        if batch.scores is not None:
            batch.scores.take_in_prompts(output)
        if batch.pooling is not None:
            assert output.pooled is not None, "the step made no vectors"
            for req in batch.pooling.take_in(output.pooled):
                self._end_broken(req, _BROKEN_VECTOR)
        wanted = self._table.alive[rows] & ~self._table.drops[rows]
        if batch.items:
            self._note_prefilled(batch)
            wanted &= batch.sample
        if tokens.shape[1] == 1:
            num_taken, rows = self._take_place(0, None if wanted.all() else np.flatnonzero(wanted), batch, output)
        else:
            num_taken, rows = self._take_all_places(np.flatnonzero(wanted), batch, output)
        self._finish_without_tokens(batch)
        self._outputs.publish(rows)
        return num_taken

    def _count_accepted(self, step: StepInput, output: StepOutput) -> None:
        """The device has decided how many tokens each row gained; until now its bound was booked."""
        table, rows = self._table, step.rows
        table.kv_len[rows] -= step.extend_lens - output.num_tokens
        table.verify_steps[rows] += 1
        table.accepted_drafts[rows] += output.num_tokens - 1
        self._num_verified += len(rows)
        self._num_accepted_drafts += int(output.num_tokens.sum()) - len(rows)

    def _take_all_places(self, wanted: np.ndarray, batch: ScheduleBatch, output: StepOutput) -> tuple[int, np.ndarray]:
        """Token by token, as if each had come in a step of its own: a row that ends at one of them drops the rest."""
        num_taken, going, rows = 0, wanted, batch.rows
        for place in range(output.token_ids.shape[1]):
            is_wanted = self._table.alive[rows[going]] & ~self._table.drops[rows[going]]
            going = going[(output.num_tokens[going] > place) & is_wanted]
            if not len(going):
                break
            num_taken += self._take_place(place, going, batch, output)[0]
        rows = rows[wanted]
        return num_taken, rows[self._table.alive[rows]]

    def _take_place(
        self, place: int, picked: np.ndarray | None, batch: ScheduleBatch, output: StepOutput
    ) -> tuple[int, np.ndarray]:
        """Books one token per row, the `place`-th it gained, and ends requests; returns how many, and the rows that go on.
        `picked` are the rows' places in the batch; None: all."""
        table, rows, tokens = self._table, batch.rows, output.token_ids[:, place]
        if picked is not None:
            rows, tokens = rows[picked], tokens[picked]
        num_taken = len(rows)
        if not num_taken:
            return 0, rows
        is_missing = tokens < 0
        if is_missing.any():
            self._end_without_token(rows[is_missing], tokens[is_missing])
            good = np.flatnonzero(~is_missing)
            picked = good if picked is None else picked[good]
            rows, tokens = rows[good], tokens[good]
        known_len = table.known_len[rows]
        table.tokens[rows, known_len] = tokens
        known_len += 1
        table.known_len[rows] = known_len
        flags = table.flags[rows]
        flags_of_any = np.bitwise_or.reduce(flags, initial=0)
        if flags_of_any & RowFlag.LOGPROBS:
            self._take_logprobs(rows, flags, picked, output, place)
        if flags_of_any & _ANSWERED:
            self._take_answers(rows, flags, picked, batch, output, place)
        ends_by_token = self._ends_by_token(rows, tokens, flags)
        ends_by_length = known_len >= table.max_len[rows]
        suspects = ends_by_token | ends_by_length | ((flags & _LOOKED_AT) != 0)
        if suspects.any():
            rows = self._end_requests(rows, tokens, np.flatnonzero(suspects), ends_by_token, ends_by_length)
        return num_taken, rows

    def _end_without_token(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            req = self._table.req(row)
            if token == NO_CANDIDATES and self._table.flags[row] & _RULING_OUT:
                reason = self._constraints.failure(req) or FinishReason.abort(_NO_CANDIDATES, 400, "BadRequestError")
                self._finish(req, reason)
            else:
                self._end_broken(req, _BROKEN_LOGITS)

    def _end_broken(self, req: Req, message: str) -> None:
        """What the model made of its tokens are no numbers."""
        self._residents.discard_prefix(req)
        self._finish(req, FinishReason.abort(message, 500, "InternalServerError"))

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
                reason = self._constraints.failure(req) or FinishReason.stop(int(tokens[i]))
            else:
                reason = self._text_or_grammar_end(req, row, int(tokens[i]))
            if (
                reason is None and ends_by_length[i] and self._table.known_len[row] >= self._table.max_len[row]
            ):  # not taken back
                reason = FinishReason.length_limit(len(self._table.output_ids(row)))
            if reason is not None:
                self._finish(req, reason)
                goes_on[i] = False
        return rows[goes_on]

    def _text_or_grammar_end(self, req: Req, row: int, token_id: int) -> FinishReason | None:
        try:
            reason = self._match_text(req, row) or self._constraints.follow(req, token_id)
            if reason is None:
                self._jumps.consider(req)
            return reason
        except Exception:  # of the tokenizer's decoder or the grammar library: one request's, not everybody's
            logger.exception("The newest token of request %s could not be looked at.", req.rid)
            return unexpected("look at the newest token")

    def _match_text(self, req: Req, row: int) -> FinishReason | None:
        if req.stop_text is None:
            return None
        matched = req.stop_text.match(self._table.output_ids(row))
        return None if matched is None else FinishReason.stop(matched, req.stop_text.pattern_of(matched))

    def _take_logprobs(
        self, rows: np.ndarray, flags: np.ndarray, picked: np.ndarray | None, output: StepOutput, place: int
    ) -> None:
        """Of the tokens just booked, for those who want them."""
        table, wanting = self._table, np.flatnonzero(flags & RowFlag.LOGPROBS)
        assert output.logprobs is not None, f"{len(wanting)} rows want logprobs and the step returned none"
        at = wanting if picked is None else picked[wanting]
        table.logprobs[rows[wanting], table.known_len[rows[wanting]] - 1] = output.logprobs[at, place]

    def _take_answers(
        self,
        rows: np.ndarray,
        flags: np.ndarray,
        picked: np.ndarray | None,
        batch: ScheduleBatch,
        output: StepOutput,
        place: int,
    ) -> None:
        """What else belongs to the tokens just booked."""
        plan = batch.scores
        for i in np.flatnonzero(flags & _ANSWERED).tolist():
            req = self._table.req(int(rows[i]))
            at = (i if picked is None else int(picked[i])), place
            if req.logprobs is not None:
                top_ids = None if output.top_ids is None else output.top_ids[at]
                top_logprobs = None if output.top_logprobs is None else output.top_logprobs[at]
                id_logprobs = None if plan is None else plan.id_logprobs(output, *at)
                req.logprobs.append(top_ids, top_logprobs, id_logprobs)
            if plan is None:
                continue
            if req.hidden_states is not None and (state := plan.hidden.answer(output.hidden_states, *at)) is not None:
                req.hidden_states.append(state)
            if req.experts is not None and (experts := plan.experts.answer(output.experts, *at)) is not None:
                req.experts.append(experts)

    def _note_prefilled(self, batch: ScheduleBatch) -> None:
        now = self._wall_clock()
        for item in batch.items:
            times = item.req.times
            times.chunk_done(now)
            if item.is_last and not times.first_token_s:
                times.first_token_s = now

    def _finish_without_tokens(self, batch: ScheduleBatch) -> None:
        """max_new_tokens = 0: the prompt was computed (and is cached now), nothing more was asked for."""
        for item in batch.items:
            if item.is_last and item.req.max_new_tokens == 0 and not item.req.is_finished:
                self._finish(item.req, FinishReason.length_limit(0))
