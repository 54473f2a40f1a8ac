"""PrefillPlanner: decides what the next prefill step holds.

Chunked requests first, then waiting requests in the policy's order as long as the adder takes them; with mixed chunks the
running requests' decode rows ride along. Where priorities say so, running requests are preempted (retracted) for more urgent
ones.
"""

from __future__ import annotations

from jaxserve.cache.shards import ShardedCache
from jaxserve.config import ServerArgs
from jaxserve.runner import RunnerSpec
from jaxserve.scheduler.adapters import Adapters
from jaxserve.scheduler.batch import NEEDS_RESULTS, NO_ROWS, NeedsResults, ScheduleBatch
from jaxserve.scheduler.chunk_times import ChunkTimes
from jaxserve.scheduler.decode import DecodeMemory, RunningBatch
from jaxserve.scheduler.kv_demand import KVDemand
from jaxserve.scheduler.policy import SchedulePolicy
from jaxserve.scheduler.preemption import Preemption
from jaxserve.scheduler.prefill_adder import AddResult, PrefillAdder, PrefillLimits
from jaxserve.scheduler.req import Req, RequestState
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowTable
from jaxserve.scheduler.shard_room import ShardRoom
from jaxserve.scheduler.token_ratio import NewTokenRatio
from jaxserve.scheduler.waiting import WaitingQueue

# Default of chunked_prefill_size if the caller did not resolve it (SGLang's for an unknown device).
DEFAULT_CHUNK_TOKENS = 4096
# One pass looks at no more requests than this that only wait for a prefix being computed.
MAX_DEFERRED = 128
# An encoder's texts cannot be split, and leave room behind them: a step is filled up with shorter ones, past so many that do
# not fit. These are the first of the next step.
MAX_PASSED_OVER = 64
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
    shard_tokens = step_tokens // spec.num_shards
    if spec.num_shards > 1:
        shard_tokens = max(shard_tokens // spec.page_size, 1) * spec.page_size
    return PrefillLimits(
        step_tokens=step_tokens,
        splits_prompts=splits_prompts,
        fills_up=not spec.keeps_kv,
        max_step_tokens=spec.max_step_tokens,
        max_running=min(args.max_running_requests or spec.max_rows, spec.max_rows),
        max_requests=args.prefill_max_requests,
        shard_tokens=shard_tokens,
        chunk_times=_chunk_times(args, spec),
    )


def _chunk_times(args: ServerArgs, spec: RunnerSpec) -> ChunkTimes | None:
    if not args.enable_dynamic_chunking or not spec.attention_work_ratio:
        return None
    buckets = tuple(args.prefill_token_buckets or ()) if spec.num_shards == 1 else ()  # shards have parts of one each
    return ChunkTimes(spec.attention_work_ratio, spec.page_size, buckets)


class PrefillPlanner:
    def __init__(
        self,
        *,
        args: ServerArgs,
        limits: PrefillLimits,
        cache: ShardedCache,
        table: RowTable,
        residents: Residents,
        waiting: WaitingQueue,
        adapters: Adapters,
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
        self._adapters = adapters
        self._policy = policy
        self._running = running
        self._memory = memory
        self._ratio = ratio
        # One plan tries no more than this, so a policy that keeps the order of arrival need not see the whole queue.
        self._most_tried = None if policy.looks_at_all else limits.max_running + MAX_DEFERRED + 1
        self._mixes = args.enable_mixed_chunk
        self._most_passed_over = MAX_PASSED_OVER if limits.fills_up else 0
        preempts = policy.by_urgency and not args.disable_priority_preemption
        self._preemption = Preemption(
            cache,
            table,
            running,
            residents,
            max_running=limits.max_running,
            threshold=args.priority_scheduling_preemption_threshold if preempts else None,
        )
        self._chunked_reqs: list[Req] = []
        self._blocked_at: tuple[int, ...] | None = None  # what the world looked like when the first request did not fit
        self._held_at: tuple[int, ...] | None = None  # when all of them waited for adapters
        self._alone_at: tuple[int, ...] | None = None  # and when only one could be added to a step
        self._must_settle = False  # the next plan may preempt, which it can only when no step is in flight
        self._num_decode_steps = 0
        self.deferred: list[Req] = []  # held back by the last plan only to find their prefix computed in the next one
        self.num_preempted = 0

    @property
    def chunked_reqs(self) -> list[Req]:
        """The requests whose prompts are partly computed, if they still are: at most one in each shard."""
        self._chunked_reqs = [req for req in self._chunked_reqs if req.state is RequestState.PREFILL]
        return self._chunked_reqs

    def plan(self, *, is_settled: bool) -> ScheduleBatch | NeedsResults | None:
        """The next prefill (or mixed) step, with rows and pages taken for it, or None. `is_settled`: no step is in flight."""
        if self._must_settle and not is_settled:
            return NEEDS_RESULTS
        self._must_settle = False
        chunks = self.chunked_reqs
        self.deferred = []
        if not chunks and (not len(self._waiting) or self._nobody_fits()):
            return None
        share = self._share_of_a_shard(len(chunks))
        num_mixed = self._num_rows_to_mix(share)
        if num_mixed and not self._memory.grow():
            return None  # no time to admit anybody: the decode step will retract
        rooms = self._rooms(share, num_mixed)
        adder = PrefillAdder(rooms, self._residents, self._limits, self._adapters, num_decode_rows=num_mixed)
        for chunk in chunks:
            adder.resume(chunk, int(self._table.kv_len[chunk.row]))
        if adder.is_closed:
            return None
        self._add_waiting(adder, is_settled)
        if not adder.items:
            return NEEDS_RESULTS if self._must_settle else None
        self._chunked_reqs = adder.chunked_reqs
        if len(adder.items) == 1:
            self._alone_at = self._arrivals()
        self._waiting.drop_admitted([item.req for item in adder.items if item.is_new])
        return ScheduleBatch(decode_rows=self._running.due_rows if num_mixed else NO_ROWS, items=adder.items)

    def after_decode(self) -> None:
        self._num_decode_steps += 1

    def _share_of_a_shard(self, num_chunked: int) -> int:
        """Tokens of the step for each shard; all of it for a prompt that is the only one, or beside which nobody could be added
        when it had a share."""
        is_alone = num_chunked + len(self._waiting) == 1 or (num_chunked == 1 and self._alone_at == self._arrivals())
        return self._limits.step_tokens if is_alone else self._limits.shard_tokens

    def _num_rows_to_mix(self, share: int) -> int:
        """Decode rows ride along if they leave at least half of the step, and of each shard's share, to prompts; else both
        kinds of step take turns."""
        count = len(self._running.due_rows)
        if not self._mixes or not count:
            return 0
        page_size, limits = self._cache.page_size, self._limits
        most = max(len(rows) for _, rows in self._cache.by_shard(self._running.due_rows))
        leaves_enough = limits.tokens_beside(count) >= max(limits.step_tokens // 2, page_size)
        return count if leaves_enough and share - most >= max(share // 2, page_size) else 0

    def _rooms(self, share: int, num_mixed: int) -> list[ShardRoom]:
        """What each shard has for prompts."""
        rows = self._running.due_rows[:num_mixed]
        return [
            ShardRoom(shard, demand, share - len(decode_rows), is_alone=not shard.num_leases)
            for (shard, decode_rows), demand in zip(self._cache.by_shard(rows), self._demands(), strict=True)
        ]

    def _demands(self) -> list[KVDemand]:
        """Of the running requests of each shard."""
        demands = []
        for shard, rows in self._cache.by_shard(self._running.rows):
            demands.append(KVDemand(shard))
            self._running.add_to(demands[-1], rows, self._ratio.value)
        return demands

    def _add_waiting(self, adder: PrefillAdder, is_settled: bool) -> None:
        ready = self._adapters.choose(self._waiting.all_admissible(), self._most_tried)
        if not ready:
            self._held_at = self._arrivals()
        num_passed_over = 0
        for req in self._policy.order(ready):
            result = adder.add(req)
            if result is AddResult.NO_ADAPTER:  # another one of this step took the last slot
                continue
            lacks_room = result in (AddResult.NO_TOKENS, AddResult.NO_ROW)
            if lacks_room and (victims := self._preemption.victims(req)):
                if not is_settled:  # what was added goes first; then all results come in, and it is this request's turn
                    self._must_settle = True
                    break
                result = self._preempt_for(req, victims, adder)
            if result is AddResult.DEFERRED and len(self.deferred) < MAX_DEFERRED:
                self.deferred.append(req)
            elif result is AddResult.STEP_FULL and adder.has_room and num_passed_over < self._most_passed_over:
                num_passed_over += 1
            elif result is not AddResult.ADDED:
                if result in (AddResult.NO_TOKENS, AddResult.NO_ROW):
                    self._blocked_at = self._world()
                break

    def _nobody_fits(self) -> bool:
        """That was found before, and nothing has changed since."""
        return self._blocked_at == self._world() or (self._held_at is not None and self._held_at == self._arrivals())

    def _arrivals(self) -> tuple[int, ...]:
        """Differs from an earlier value if somebody may be added now who could not be then."""
        return (self._waiting.num_pushed, self._waiting.only_begun, *self._world())

    def _world(self) -> tuple[int, ...]:
        """Differs from an earlier value if a request that did not fit then may fit now."""
        waiting = self._waiting
        pushed = waiting.num_pushed if self._policy.reorders else 0
        changes = self._residents.num_changes + self._adapters.num_changes
        return (changes, waiting.num_removed, pushed, self._num_decode_steps // RETRY_DECODE_STEPS)

    def _preempt_for(self, req: Req, victims: list[Req], adder: PrefillAdder) -> AddResult:
        """Retracts them, until `req` fits."""
        result = AddResult.NO_TOKENS
        for victim in victims:
            self._memory.retract([victim])
            self.num_preempted += 1
            adder.restart_memory(self._demands())
            result = adder.add(req)
            if result not in (AddResult.NO_TOKENS, AddResult.NO_ROW):
                break
        return result
