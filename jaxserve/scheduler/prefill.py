"""PrefillPlanner: decides what the next prefill step holds.

The chunked request first, then waiting requests in the policy's order as long as the adder takes them; with mixed chunks the
running requests' decode rows ride along. Where priorities say so, running requests are preempted (retracted) for more urgent
ones.
"""

from __future__ import annotations

import numpy as np

from jaxserve.cache.manager import CacheManager
from jaxserve.config import ServerArgs
from jaxserve.runner import RunnerSpec
from jaxserve.scheduler.batch import NEEDS_RESULTS, NO_ROWS, NeedsResults, ScheduleBatch
from jaxserve.scheduler.decode import DecodeMemory, RunningBatch
from jaxserve.scheduler.kv_demand import KVDemand
from jaxserve.scheduler.policy import SchedulePolicy
from jaxserve.scheduler.prefill_adder import AddResult, PrefillAdder, PrefillLimits
from jaxserve.scheduler.req import Req, RequestState
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowTable
from jaxserve.scheduler.token_ratio import NewTokenRatio
from jaxserve.scheduler.waiting import WaitingQueue

# Default of chunked_prefill_size if the caller did not resolve it (SGLang's for an unknown device).
DEFAULT_CHUNK_TOKENS = 4096
# One pass looks at no more requests than this that only wait for a prefix being computed.
MAX_DEFERRED = 128
# A queue whose first request did not fit is tried again when something was released, and each time this many decode steps ran
# (new_token_ratio falls meanwhile).
RETRY_DECODE_STEPS = 16


def prefill_limits(args: ServerArgs, spec: RunnerSpec) -> PrefillLimits:
    """Raises ValueError if no chunk could ever be run."""
    chunk_tokens = DEFAULT_CHUNK_TOKENS if args.chunked_prefill_size is None else args.chunked_prefill_size
    splits_prompts = chunk_tokens != -1
    step_tokens = min(args.max_prefill_tokens, spec.max_step_tokens)
    if splits_prompts:
        step_tokens = min(step_tokens, chunk_tokens)
    if step_tokens < spec.page_size:
        raise ValueError(
            f"A prefill step of {step_tokens} tokens (the least of --chunked-prefill-size, --max-prefill-tokens and the "
            f"largest prefill bucket) cannot fill one page of {spec.page_size} tokens."
        )
    return PrefillLimits(
        step_tokens=step_tokens,
        splits_prompts=splits_prompts,
        max_step_tokens=spec.max_step_tokens,
        max_running=min(args.max_running_requests or spec.max_rows, spec.max_rows),
        max_requests=args.prefill_max_requests,
    )


class PrefillPlanner:
    def __init__(
        self,
        *,
        args: ServerArgs,
        limits: PrefillLimits,
        cache: CacheManager,
        table: RowTable,
        residents: Residents,
        waiting: WaitingQueue,
        policy: SchedulePolicy,
        running: RunningBatch,
        memory: DecodeMemory,
        ratio: NewTokenRatio,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._table = table
        self._residents = residents
        self._waiting = waiting
        self._policy = policy
        self._running = running
        self._memory = memory
        self._ratio = ratio
        # One plan tries no more than this, so a policy that keeps the order of arrival need not see the whole queue.
        self._most_tried = None if policy.looks_at_all else limits.max_running + MAX_DEFERRED + 1
        self._mixes = args.enable_mixed_chunk
        self._preempts = policy.by_urgency and not args.disable_priority_preemption
        self._preemption_threshold = args.priority_scheduling_preemption_threshold
        self._chunked_req: Req | None = None
        self._blocked_at: tuple[int, ...] | None = None  # what the world looked like when the first request did not fit
        self._must_settle = False  # the next plan may preempt, which it can only when no step is in flight
        self._num_decode_steps = 0
        self.deferred: list[Req] = []  # held back by the last plan only to find their prefix computed in the next one
        self.num_preempted = 0

    @property
    def chunked_req(self) -> Req | None:
        """The request whose prompt is partly computed, if it still is one."""
        if self._chunked_req is not None and self._chunked_req.state is not RequestState.PREFILL:
            self._chunked_req = None
        return self._chunked_req

    def plan(self, *, is_settled: bool) -> ScheduleBatch | NeedsResults | None:
        """The next prefill (or mixed) step, with rows and pages taken for it, or None. `is_settled`: no step is in flight."""
        if self._must_settle and not is_settled:
            return NEEDS_RESULTS
        self._must_settle = False
        self.deferred = []
        chunk = self.chunked_req
        if chunk is None and (not len(self._waiting) or self._blocked_at == self._world()):
            return None
        num_mixed = self._num_rows_to_mix()
        if num_mixed and not self._memory.grow():
            return None  # no time to admit anybody: the decode step will retract
        adder = self._adder(num_mixed)
        if chunk is not None and adder.resume(chunk, int(self._table.kv_len[chunk.row])) is not AddResult.ADDED:
            return None
        self._add_waiting(adder, is_settled)
        if not adder.items:
            return NEEDS_RESULTS if self._must_settle else None
        self._chunked_req = adder.chunked_req
        self._waiting.drop_admitted([item.req for item in adder.items if item.is_new])
        return ScheduleBatch(decode_rows=self._running.rows if num_mixed else NO_ROWS, items=adder.items)

    def after_decode(self) -> None:
        self._num_decode_steps += 1

    def _num_rows_to_mix(self) -> int:
        """Decode rows ride along if they leave at least half of the step to prompts; else both kinds of step take turns."""
        count = len(self._running)
        if not self._mixes or not count:
            return 0
        enough = max(self._limits.step_tokens // 2, self._cache.page_size)
        return count if self._limits.tokens_beside(count) >= enough else 0

    def _adder(self, num_mixed: int) -> PrefillAdder:
        return PrefillAdder(
            self._cache,
            self._residents,
            self._limits,
            num_decode_rows=num_mixed,
            demand=self._demand(),
            is_alone=not len(self._residents),
        )

    def _demand(self) -> KVDemand:
        """Of the running requests."""
        demand = KVDemand(self._cache)
        self._running.add_to(demand, self._ratio.value)
        return demand

    def _add_waiting(self, adder: PrefillAdder, is_settled: bool) -> None:
        for req in self._policy.order(self._waiting.admissible(self._most_tried)):
            result = adder.add(req)
            if result in (AddResult.NO_TOKENS, AddResult.NO_ROW) and self._may_preempt_for(req):
                if not is_settled:  # what was added goes first; then all results come in, and it is this request's turn
                    self._must_settle = True
                    break
                result = self._preempt_for(req, adder)
            if result is AddResult.DEFERRED and len(self.deferred) < MAX_DEFERRED:
                self.deferred.append(req)
            elif result is not AddResult.ADDED:
                if result in (AddResult.NO_TOKENS, AddResult.NO_ROW):
                    self._blocked_at = self._world()
                break

    def _world(self) -> tuple[int, ...]:
        """Differs from an earlier value if a request that did not fit then may fit now."""
        waiting = self._waiting
        pushed = waiting.num_pushed if self._policy.reorders else 0
        return (self._residents.num_changes, waiting.num_removed, pushed, self._num_decode_steps // RETRY_DECODE_STEPS)

    # --- preemption

    def _preempt_for(self, req: Req, adder: PrefillAdder) -> AddResult:
        """Retracts less urgent running requests, the least urgent and latest first, until `req` fits."""
        result = AddResult.NO_TOKENS
        for victim in self._victims(req):
            self._memory.retract([victim])
            self.num_preempted += 1
            adder.restart_memory(self._demand(), is_alone=not len(self._residents))
            result = adder.add(req)
            if result not in (AddResult.NO_TOKENS, AddResult.NO_ROW):
                break
        return result

    def _victims(self, req: Req) -> list[Req]:
        running = [self._table.req(row) for row in self._running.rows.tolist() if self._table.alive[row]]
        victims = [other for other in running if req.urgency - other.urgency > self._preemption_threshold]
        return sorted(victims, key=lambda other: (other.urgency, -other.arrival))

    def _may_preempt_for(self, req: Req) -> bool:
        """Whether all victims together hold the memory that `req` needs (each at most; shared prefixes stay)."""
        victims = self._victims(req) if self._preempts else []
        if not victims:
            return False
        rows = np.array([victim.row for victim in victims], np.int32)
        held = int(self._table.max_len[rows].sum())
        return req.fill_len + self._cache.page_size < held + self._cache.available_tokens
