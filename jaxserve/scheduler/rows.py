"""RowTable: what the scheduler knows about every request row, as NumPy arrays indexed by row.

One entry per row of the device tables. A decode step reads and writes these arrays for all its rows at once; no Python object
is touched for a request that merely got its next token. Filled by `put` at admission; valid until the row is released.

Lengths of a row, all in tokens of its sequence (prompt and output):

    kv_len     written to the KV cache once every launched step has run; where steps verify drafts, at most: how many tokens a
               launched step adds is known when its result is in
    known_len  known on the host: the prompt and the outputs whose results were processed
    max_len    where the sequence ends by length

The step that brings kv_len to k samples token k (counted from 0), so a row with kv_len + 1 >= max_len needs no further step.
"""

from __future__ import annotations

import numpy as np

from jaxserve.messages import NO_STOP_TRIM, SKIP_SPECIAL_TOKENS, SPACES_BETWEEN_SPECIAL_TOKENS, Route
from jaxserve.scheduler.req import Req
from jaxserve.types import MAX_STOP_TOKEN_IDS

# Requests that do not stream still send this often: it bounds what one message to the detokenizer can hold (SGLang's number).
FORCED_SEND_INTERVAL_TOKENS = 50
NO_TOKEN = -3  # not a token id, and nothing that a StepOutput has in place of one


class RowFlag:
    """Bits of RowTable.flags. Plain numbers: beside an array a member of an enum costs microseconds; a step has few of them."""

    SAMPLING = 1  # not greedy
    ADJUSTING = 2  # penalties, logit_bias or min_new_tokens
    LOGPROBS = 4
    TOP_LOGPROBS = 8
    EOS_STOPS = 16
    OWN_STOP_IDS = 32
    STOP_TEXT = 64
    GRAMMAR = 256
    SCORES = 512  # logprobs of prompt tokens, or of tokens that the request names
    TOKEN_STATES = 1024  # hidden states or experts of its tokens
    THINKING = 2048  # its grammar begins when it has thought: its tokens are looked at, no mask is needed
    RULES = 4096  # named logit processors: from masks_from on masks are needed
    PROCESSOR = 8192  # code of the user's own
    POOLS = 16384  # a vector is made of its prompt
    UNANNOUNCED = 128  # nothing was sent yet: the next message carries what the detokenizer must know


class RowTable:
    def __init__(
        self,
        *,
        max_rows: int,
        context_len: int,
        default_stream_interval: int,
        num_draft_tokens: int = 1,
        thinks_ahead: bool = False,
    ) -> None:
        """`thinks_ahead`: a step with rows that think is sampled before the results of the step before are in."""
        self.thinks_ahead = thinks_ahead
        self._default_stream_interval = default_stream_interval
        # Not cleared: the operating system provides pages of this large table only where rows were really used.
        self.tokens = np.empty((max_rows, context_len), np.int32)
        self.logprobs = np.empty((max_rows, context_len), np.float32)  # of outputs, by position, with RowFlag.LOGPROBS
        self.reqs: list[Req | None] = [None] * max_rows
        self.rids: list[str] = [""] * max_rows
        self.alive = np.zeros(max_rows, bool)  # the row's request wants more tokens; False: it waits for its last step
        self.is_held = np.zeros(max_rows, bool)  # the row takes part in no step until it was sent back: see `jumps`
        self.drops = np.zeros(max_rows, bool)  # and what launched steps sampled for it is not wanted
        self.in_flight = np.zeros(max_rows, np.int32)  # launched, unprocessed steps that name the row
        self.kv_len = np.zeros(max_rows, np.int32)
        self.known_len = np.zeros(max_rows, np.int32)
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.max_len = np.zeros(max_rows, np.int32)
        self.cached_len = np.zeros(max_rows, np.int32)
        self.sent_len = np.zeros(max_rows, np.int32)  # output tokens sent
        self.send_at_len = np.zeros(max_rows, np.int32)  # output tokens at which the next message is due
        self.send_every = np.zeros(max_rows, np.int32)
        self.decode_flags = np.zeros(max_rows, np.uint8)  # as in BatchTokenIDOut
        self.routes: list[Route] = []  # all that requests had so far: they are few
        self.route = np.zeros(max_rows, np.int32)  # which of `routes`
        self.flags = np.zeros(max_rows, np.uint16)  # RowFlag bits
        self.masks_from = np.zeros(max_rows, np.int32)  # with RowFlag.RULES: shorter sequences may go on with any token
        self.ignores_eos = np.zeros(max_rows, bool)
        self.verify_steps = np.zeros(max_rows, np.int32)  # steps that verified drafts for the request, and drafts it accepted
        self.accepted_drafts = np.zeros(max_rows, np.int32)
        self.drafts = np.full((max_rows, num_draft_tokens - 1), NO_TOKEN, np.int32)  # for the next step, as StepOutput says
        self.own_stop_ids = np.full((max_rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, np.int32)

    def put(self, req: Req) -> None:
        """Fills the row of a request that was just admitted (again)."""
        row, fill_len = req.row, req.fill_len
        assert self.reqs[row] is None and not self.in_flight[row], f"row {row} of {req.rid} is not free"
        assert req.lease is not None
        self.reqs[row], self.rids[row] = req, req.rid
        self.tokens[row, : req.prompt_len] = req.prompt_ids
        self.tokens[row, req.prompt_len : fill_len] = req.output_ids
        if req.logprobs is not None:
            self.logprobs[row, req.prompt_len : fill_len] = req.output_logprobs
        self.alive[row] = True
        self.is_held[row] = self.drops[row] = False
        self.kv_len[row] = req.lease.prefix_len
        self.known_len[row] = fill_len
        self.prompt_len[row] = req.prompt_len
        self.max_len[row] = req.max_len
        self.cached_len[row] = req.cached_len
        self.sent_len[row] = req.sent_len
        every = self._default_stream_interval if req.sampling.stream_interval is None else req.sampling.stream_interval
        self.send_every[row] = every if req.stream else FORCED_SEND_INTERVAL_TOKENS
        is_first_streamed = req.stream and not req.sent_len
        self.send_at_len[row] = 1 if is_first_streamed else req.sent_len + self.send_every[row]
        self.decode_flags[row] = decode_flags(req)
        if req.route not in self.routes:
            self.routes.append(req.route)
        self.route[row] = self.routes.index(req.route)
        self.flags[row] = _row_flags(req, self.thinks_ahead)
        if req.rules is not None:
            self.masks_from[row] = req.rules.free_len(self.tokens[row, :fill_len])
        self.ignores_eos[row] = req.sampling.ignore_eos
        self.verify_steps[row], self.accepted_drafts[row] = req.verify_steps, req.accepted_drafts
        self.own_stop_ids[row] = NO_TOKEN
        self.own_stop_ids[row, : len(req.own_stop_ids)] = req.own_stop_ids

    def clear(self, row: int) -> None:
        assert not self.in_flight[row], f"row {row} ({self.rids[row]}) is named by {self.in_flight[row]} launched steps"
        self.reqs[row], self.rids[row] = None, ""
        self.alive[row] = False
        self.flags[row] = 0

    def longest_after_step(self, rows: np.ndarray, num_tokens: int) -> np.ndarray:
        """int32: tokens that rows which need more may hold after a decode step of up to `num_tokens`. The last token of a
        sequence is never written to the cache."""
        if num_tokens == 1:
            return self.kv_len[rows] + 1
        return np.minimum(self.kv_len[rows] + num_tokens, self.max_len[rows] - 1)

    def earliest_start(self, rows: np.ndarray) -> np.ndarray:
        """int32: where the first token that the rows' next decode step adds stands, or before that."""
        if not self.drafts.shape[1]:
            return self.kv_len[rows]
        return np.minimum(self.kv_len[rows], self.known_len[rows] - 1)

    def req(self, row: int) -> Req:
        req = self.reqs[row]
        assert req is not None, f"row {row} holds no request"
        return req

    def known_ids(self, row: int) -> np.ndarray:
        """The sequence of a row; a view."""
        return self.tokens[row, : int(self.known_len[row])]

    def output_ids(self, row: int, start: int = 0) -> np.ndarray:
        """The known outputs of a row from output `start` on; a view."""
        return self.tokens[row, int(self.prompt_len[row]) + start : int(self.known_len[row])]

    def output_logprobs(self, row: int, start: int = 0) -> np.ndarray:
        """Theirs, of a row with RowFlag.LOGPROBS; a view."""
        return self.logprobs[row, int(self.prompt_len[row]) + start : int(self.known_len[row])]


def decode_flags(req: Req) -> int:
    sampling = req.sampling
    return (
        SKIP_SPECIAL_TOKENS * sampling.skip_special_tokens
        | SPACES_BETWEEN_SPECIAL_TOKENS * sampling.spaces_between_special_tokens
        | NO_STOP_TRIM * sampling.no_stop_trim
    )


def _row_flags(req: Req, thinks_ahead: bool) -> int:
    sampling, flags = req.sampling, 0
    if not sampling.is_greedy:
        flags |= RowFlag.SAMPLING
    if sampling.has_penalties or sampling.logit_bias or sampling.min_new_tokens:
        flags |= RowFlag.ADJUSTING
    if req.logprobs is not None:
        flags |= RowFlag.LOGPROBS
        if req.logprobs.top_num:
            flags |= RowFlag.TOP_LOGPROBS
    if req.prompt_logprobs is not None or req.token_ids_logprob is not None:
        flags |= RowFlag.SCORES
    if req.returns_states:
        flags |= RowFlag.TOKEN_STATES
    if req.vectors is not None:
        flags |= RowFlag.POOLS
    if not sampling.ignore_eos:
        flags |= RowFlag.EOS_STOPS
    if len(req.own_stop_ids):
        flags |= RowFlag.OWN_STOP_IDS
    if req.matcher is not None:
        thinks_ahead = thinks_ahead and not req.returns_states and req.matcher.is_free_along(())
        flags |= RowFlag.THINKING if thinks_ahead else RowFlag.GRAMMAR
    if req.rules is not None:
        flags |= RowFlag.RULES
    if req.processor is not None:
        flags |= RowFlag.PROCESSOR
    if req.stop_text is not None:
        flags |= RowFlag.STOP_TEXT
    if not req.announced:
        flags |= RowFlag.UNANNOUNCED
    return flags
