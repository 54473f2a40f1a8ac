"""Jumps: where a grammar leaves no choice for several tokens, they are taken over at once and computed as a prefill.

    results say: k tokens are forced     `consider`   the request sits out the next steps
    no launched step names it any more   `carry_out`  the tokens are its own now; it waits to be admitted again, in front
    admitted again                                    its prefix is in the tree: one step computes what was taken over

A run of k tokens then takes two steps, for the step after the results is launched already. The step that computes them is one
that all others wait for, unless steps mix; so a run must be longer than there are others. A request whose tokens are looked at
one by one (logprobs, hidden states, experts, stop strings, stop tokens of its own, logit processors) does not jump. Which
tokens come out does not change.

The same way goes a request whose next token is to be sampled again (`redo`): see `constraints`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxserve.scheduler.decode import RunningBatch
from jaxserve.scheduler.req import Req, RequestState, unexpected
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.scheduler.waiting import WaitingQueue
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

SHORTEST_RUN = 4
# With more running beside it no run is long enough; then nobody need look.
_MOST_OTHERS = 12
_LOOKED_AT = RowFlag.STOP_TEXT | RowFlag.OWN_STOP_IDS | RowFlag.LOGPROBS | RowFlag.TOKEN_STATES
_LOOKED_AT |= RowFlag.RULES | RowFlag.PROCESSOR


class Jumps:
    def __init__(
        self,
        table: RowTable,
        residents: Residents,
        waiting: WaitingQueue,
        running: RunningBatch,
        finish: Callable[[Req, FinishReason], None],
        *,
        is_on: bool,
        mixes: bool,
        num_stages: int = 1,
    ) -> None:
        """`mixes`: decode rows ride along in prefill steps. `num_stages`: of a pipeline, in which a step takes the others as
        much less of the time that a token of theirs takes."""
        self._table = table
        self._residents = residents
        self._waiting = waiting
        self._running = running
        self._finish = finish
        self._is_on = is_on
        self._mixes = mixes
        self._num_stages = num_stages
        self._held: list[Req] = []
        self.num_jumps = 0

    def __len__(self) -> int:
        """Requests that sit out."""
        return len(self._held)

    def consider(self, req: Req) -> None:
        """After the newest token of a request that goes on."""
        if req.matcher is None or not self._is_on:
            return
        others = 0 if self._mixes else max(len(self._running) - 1, 0) // self._num_stages
        row = req.row
        if others > _MOST_OTHERS or self._table.is_held[row] or self._table.flags[row] & _LOOKED_AT:
            return
        if len(req.matcher.forced_tokens()) >= SHORTEST_RUN + others:
            self._hold(req)

    def redo(self, req: Req) -> None:
        """What launched steps sample for it is to be sampled again."""
        self._table.drops[req.row] = True
        self._hold(req)

    def _hold(self, req: Req) -> None:
        self._table.is_held[req.row] = True
        self._held.append(req)

    def carry_out(self) -> int:
        """For those that no launched step names. Returns how many tokens they gained."""
        num_tokens = 0
        for req in list(self._held):
            if req.state is not RequestState.DECODE or not self._table.is_held[req.row]:  # it ended, or was retracted
                self._held.remove(req)
            elif not self._table.in_flight[req.row]:
                self._held.remove(req)
                try:
                    num_tokens += self._jump(req)
                except Exception:  # of the grammar library: one request's, not everybody's
                    logger.exception("Request %s could not be given the tokens that its grammar forces.", req.rid)
                    self._finish(req, unexpected("follow the grammar"))
        return num_tokens

    def _jump(self, req: Req) -> int:
        table, row, matcher = self._table, req.row, req.matcher
        assert matcher is not None
        is_to_redo = table.drops[row]
        table.is_held[row] = table.drops[row] = False
        known_len = int(table.known_len[row])
        room = int(table.max_len[row]) - known_len - 1  # the last one is sampled, as ever
        count = 0
        forced = [] if table.flags[row] & _LOOKED_AT else matcher.forced_tokens()
        for token_id in forced[: max(room, 0)]:
            if not matcher.accept(token_id):
                break
            table.tokens[row, known_len + count] = token_id
            count += 1
        if not count and not is_to_redo:
            return 0
        self.num_jumps += 1
        req.times.num_jumps += 1
        computed_len = min(int(table.kv_len[row]), known_len)
        table.known_len[row] = known_len + count
        if matcher.is_terminated:
            self._finish(req, FinishReason.stop(None))
        else:
            self._running.remove(row)
            self._residents.send_back(req, computed_len)
            self._waiting.push_front([req])
        return count
