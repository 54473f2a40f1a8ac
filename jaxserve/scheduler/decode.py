"""The running requests: which rows decode next, what they may still need, and who gives way when the KV cache is full.

RunningBatch is an ordered array of request rows. DecodeMemory makes sure that each of them has a page for its next token, by
retraction if need be: retracted requests go back to the front of the waiting queue with their outputs and are computed again
later.
"""

from __future__ import annotations

import logging

import numpy as np

from jaxserve.cache.manager import CacheManager
from jaxserve.cache.shards import ShardedCache
from jaxserve.scheduler.batch import NO_ROWS, ScheduleBatch
from jaxserve.scheduler.kv_demand import KVDemand
from jaxserve.scheduler.micro_batches import MicroBatches
from jaxserve.scheduler.prefill_adder import CLIP_MAX_NEW_TOKENS
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.rows import RowTable
from jaxserve.scheduler.token_ratio import RETRACT_DECODE_STEPS, NewTokenRatio
from jaxserve.scheduler.waiting import WaitingQueue

logger = logging.getLogger(__name__)


class RunningBatch:
    """The running requests whose prompt was launched, in the order they joined. `rows` holds those that can decode,
    `next_rows` those of them whose step is next: all, unless micro-batches divide them. Both are replaced, never written to:
    launched steps refer to them.

    The others wait for results: those whose last token is being sampled, for their end by length is known already, those that
    may have reached their end, if drafts were accepted, and those that are about to jump (`jumps`).
    """

    def __init__(self, table: RowTable, micro_batches: MicroBatches | None = None) -> None:
        """`micro_batches`: of a pipeline."""
        self._table = table
        self._micro_batches = micro_batches
        self._members = self.rows = self.next_rows = np.zeros(0, np.int32)
        self.due_rows = self.rows  # `next_rows` unless they would have to wait on the device for a step that is under way

    def __len__(self) -> int:
        return len(self.rows)

    def launched(self, batch: ScheduleBatch) -> None:
        if self._micro_batches is not None:
            self._micro_batches.launched(batch)

    def join(self, rows: list[int]) -> None:
        self._members = np.concatenate([self._members, np.array(rows, np.int32)])

    def refresh(self) -> None:
        """Before planning: steps were launched and results came in since."""
        table = self._table
        alive = table.alive[self._members]
        if not alive.all():
            self._members = self._members[alive]
        needs_more = (table.kv_len[self._members] + 1 < table.max_len[self._members]) & ~table.is_held[self._members]
        self.rows = self._members if needs_more.all() else self._members[needs_more]
        self.pick()

    def pick(self) -> None:
        """Whose step is next, of `rows` as they are now."""
        self.next_rows = self.due_rows = self.rows
        if self._micro_batches is not None:
            micro_batch = self._micro_batches.pick(self.rows)
            self.next_rows = micro_batch.rows
            self.due_rows = micro_batch.rows if micro_batch.is_due else NO_ROWS

    def remove(self, row: int) -> None:
        """Nobody takes its place in the next step: that one may have its pages already."""
        self._members = self._members[self._members != row]
        self.rows = self.rows[self.rows != row]
        if self._micro_batches is None:
            self.next_rows = self.due_rows = self.rows
        else:
            self.next_rows, self.due_rows = self.next_rows[self.next_rows != row], self.due_rows[self.due_rows != row]

    def add_to(self, demand: KVDemand, rows: np.ndarray, new_token_ratio: float) -> None:
        """What some of them may still produce: that share of what they may at most; all of it for those that ignore eos."""
        table = self._table
        held = table.kv_len[rows]
        most = np.minimum(table.max_len[rows] - held, CLIP_MAX_NEW_TOKENS)
        demand.add_all(held, held + most * np.where(table.ignores_eos[rows], 1.0, new_token_ratio))


class DecodeMemory:
    def __init__(
        self,
        *,
        cache: ShardedCache,
        table: RowTable,
        residents: Residents,
        waiting: WaitingQueue,
        running: RunningBatch,
        ratio: NewTokenRatio,
        retraction_policy: str,
        num_draft_tokens: int,
    ) -> None:
        self._cache = cache
        self._table = table
        self._residents = residents
        self._waiting = waiting
        self._running = running
        self._ratio = ratio
        self._tokens_per_step = num_draft_tokens
        self._by_urgency = retraction_policy == "priority"
        self._num_retracted = 0
        self._num_retracted_input_tokens = self._num_retracted_output_tokens = 0

    def counts(self) -> dict[str, int]:
        return {
            "num_retractions": self._num_retracted,
            "num_retracted_input_tokens": self._num_retracted_input_tokens,
            "num_retracted_output_tokens": self._num_retracted_output_tokens,
        }

    def grow(self) -> bool:
        """Pages for what the next step may add to each of its decode rows, or False and nothing happened."""
        rows = self._running.next_rows
        ends = self._table.longest_after_step(rows, self._tokens_per_step)
        return self._cache.grow_rows(rows, self._table.earliest_start(rows), ends, self._table.kv_len[rows])

    def make_room(self) -> Req | None:
        """Called when `grow` failed: retracts until it succeeds. No step may be in flight, as it would name the retracted.

        At least one request stays in each shard. Returns one if there is no room even for that one alone; the caller ends it.
        """
        victims = self._retract_until_fits()
        self._running.pick()
        rows = self._running.rows
        self._ratio.after_retraction(
            int((self._table.known_len[rows] - self._table.prompt_len[rows]).sum()),
            int((self._table.max_len[rows] - self._table.prompt_len[rows]).sum()),
            len(rows),
        )
        logger.info(
            "KV cache is full: retracted %d requests, %d keep running, new_token_ratio %.3f",
            len(victims), len(rows), self._ratio.value,
        )  # fmt: skip
        return None if self.grow() else self._table.req(int(self._short_shards()[0][1][0]))

    def retract(self, reqs: list[Req]) -> None:
        """Back to the front of the waiting queue. No launched step may name them."""
        for req in reqs:
            self._running.remove(req.row)
            self._residents.retract(req)
            self._num_retracted_input_tokens += req.prompt_len
            self._num_retracted_output_tokens += len(req.output_ids)
        self._waiting.push_front(reqs)
        self._num_retracted += len(reqs)

    def _retract_until_fits(self) -> list[Req]:
        """Room for several steps: retracting for one step only would have to be repeated at the next."""
        victims: list[Req] = []
        for shard, rows in self._short_shards():
            for req in self._in_retraction_order(rows)[:-1]:
                if self._fits(shard, rows, RETRACT_DECODE_STEPS):
                    break
                rows = rows[rows != req.row]
                self.retract([req])
                victims.append(req)
        return victims

    def _short_shards(self) -> list[tuple[CacheManager, np.ndarray]]:
        """Those that lack pages for the next step, with their running rows; some request runs."""
        shards = [(shard, rows) for shard, rows in self._cache.by_shard(self._running.rows) if len(rows)]
        return [(shard, rows) for shard, rows in shards if not self._fits(shard, rows)] or shards

    def _fits(self, shard: CacheManager, rows: np.ndarray, num_steps: int = 1) -> bool:
        lengths = self._table.longest_after_step(rows, max(num_steps, self._tokens_per_step))
        return shard.has_room(rows, lengths)

    def _in_retraction_order(self, rows: np.ndarray) -> list[Req]:
        """Fewest output tokens first (least work lost), then longest prompt (most memory won), then the youngest."""
        table = self._table

        def cost(req: Req) -> tuple[int, int, int, int]:
            output_len = int(table.known_len[req.row]) - req.prompt_len
            return (req.urgency if self._by_urgency else 0, output_len, -req.prompt_len, -req.arrival)

        return sorted((table.req(row) for row in rows.tolist()), key=cost)
