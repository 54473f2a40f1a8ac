"""ScheduleBatch: who takes part in one step, and the StepInput made from it.

Decode rows first, then extend rows, as the runner wants them. All arrays of a StepInput are made for it or never written again:
the runner may still read them while later steps are prepared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxserve.runner import NO_SLOT, AdapterLoad, EmbeddedTokens, PageUpdates, RowState, StepInput, Vectors
from jaxserve.scheduler.pooling import PoolPlan, plan_pooling
from jaxserve.scheduler.prefill_item import PrefillItem
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.scheduler.scores import ASKING, ScorePlan, plan_scores
from jaxserve.types import ForwardMode

NO_ROWS = np.zeros(0, np.int32)
NO_ROWS.flags.writeable = False


@dataclasses.dataclass(frozen=True)
class NeedsResults:
    """In place of a batch: who goes on depends on the results of launched steps. Take them in, then plan again."""


NEEDS_RESULTS = NeedsResults()


@dataclasses.dataclass
class ScheduleBatch:
    decode_rows: np.ndarray  # int32
    items: list[PrefillItem] = dataclasses.field(default_factory=list)
    scores: ScorePlan | None = None  # what is asked besides; from when its StepInput is made
    pooling: PoolPlan | None = None  # what vectors are made of, from then on, too

    @property
    def mode(self) -> ForwardMode:
        if not self.items:
            return ForwardMode.DECODE
        return ForwardMode.MIXED if len(self.decode_rows) else ForwardMode.EXTEND

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """int32 [R], all rows of the step in its order."""
        if not self.items:
            return self.decode_rows
        return np.concatenate([self.decode_rows, np.array([item.row for item in self.items], np.int32)])

    @functools.cached_property
    def sample(self) -> np.ndarray:
        """bool [R]: rows whose token is wanted. Not a chunk inside a prompt, nor a request for no tokens at all."""
        wanted = [item.is_last and item.req.max_len > item.fill_len for item in self.items]
        return np.concatenate([np.ones(len(self.decode_rows), bool), np.array(wanted, bool)])

    @functools.cached_property
    def num_prefill_tokens(self) -> int:
        return sum(item.end - item.start for item in self.items)


class StepBuilder:
    """Makes StepInputs from batches and the row table."""

    def __init__(self, table: RowTable, num_draft_tokens: int = 1, vectors: Vectors | None = None) -> None:
        """`vectors` as in RunnerSpec."""
        self._table = table
        self._vectors = vectors
        self._num_draft_tokens = num_draft_tokens
        self._ones = np.ones(len(table.alive), np.int32)
        self._trues = np.ones(len(table.alive), bool)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def build(self, batch: ScheduleBatch, page_updates: PageUpdates, adapter_loads: Sequence[AdapterLoad] = ()) -> StepInput:
        """Before the batch is booked as launched: kv_len is still that of the step before."""
        decode_rows, items = batch.decode_rows, batch.items
        num_decode = len(decode_rows)
        seq_lens, extend_lens = self._decode_lens(batch)
        sample, input_ids = self._trues[:num_decode], NO_ROWS
        flags = asks = int(np.bitwise_or.reduce(self._table.flags[decode_rows], initial=0))
        if items:
            seq_lens = np.concatenate([seq_lens, np.array([item.end for item in items], np.int32)])
            lens = np.array([item.end - item.start for item in items], np.int32)
            extend_lens = np.concatenate([extend_lens, lens])
            sample = batch.sample
            input_ids = np.concatenate([self._table.tokens[item.row, item.start : item.end] for item in items])
            item_flags = self._table.flags[batch.rows[num_decode:]]
            flags |= int(np.bitwise_or.reduce(item_flags[sample[num_decode:]], initial=0))
            asks |= int(np.bitwise_or.reduce(item_flags, initial=0))
            if asks & RowFlag.POOLS:
                assert self._vectors is not None
                batch.pooling = plan_pooling(items, lens, num_decode, self._vectors)
        if asks & ASKING:
            tokens_per_row = 1 if items else self._num_draft_tokens
            batch.scores = plan_scores(self._table, decode_rows, items, tokens_per_row)
        needs_masks = bool(flags & (RowFlag.GRAMMAR | RowFlag.PROCESSOR)) or self._rules_begin(flags, batch, seq_lens, sample)
        return StepInput(
            mode=batch.mode,
            rows=batch.rows,
            seq_lens=seq_lens,
            extend_lens=extend_lens,
            num_decode_rows=num_decode,
            input_ids=input_ids,
            sample=sample,
            page_updates=page_updates,
            new_rows=[self._row_state(item) for item in items if item.is_new],
            needs_sampling=bool(flags & RowFlag.SAMPLING),
            needs_adjusting=bool(flags & RowFlag.ADJUSTING),
            needs_logprobs=bool(flags & RowFlag.LOGPROBS),
            needs_top_logprobs=bool(flags & RowFlag.TOP_LOGPROBS),
            needs_masks=needs_masks,
            score_query=None if batch.scores is None else batch.scores.query,
            hidden_slots=None if batch.scores is None else batch.scores.hidden.all_slots,
            expert_slots=None if batch.scores is None else batch.scores.experts.all_slots,
            pool_query=None if batch.pooling is None else batch.pooling.query,
            embeds=_embeds(items, first_slot=num_decode),
            adapter_loads=adapter_loads,
        )

    def _rules_begin(self, flags: int, batch: ScheduleBatch, seq_lens: np.ndarray, sample: np.ndarray) -> bool:
        """Whether the rules of some row may rule out tokens."""
        if not flags & RowFlag.RULES:
            return False
        rows = batch.rows
        has_rules = (self._table.flags[rows] & RowFlag.RULES) != 0
        return bool((has_rules & sample & (seq_lens >= self._table.masks_from[rows])).any())

    def _decode_lens(self, batch: ScheduleBatch) -> tuple[np.ndarray, np.ndarray]:
        """seq_lens and extend_lens of the decode rows. Steps that also prefill verify no drafts."""
        table, rows = self._table, batch.decode_rows
        if self._num_draft_tokens == 1 or batch.items:
            return table.kv_len[rows] + 1, self._ones[: len(rows)]
        seq_lens = table.longest_after_step(rows, self._num_draft_tokens)
        return seq_lens, seq_lens - table.kv_len[rows]

    def _row_state(self, item: PrefillItem) -> RowState:
        req = item.req
        return RowState(
            row=item.row,
            sampling=req.sampling,
            seed=req.seed,
            prompt_len=req.prompt_len,
            stop_token_ids=req.device_stop_ids,
            output_ids=req.output_ids,
            token_ids=self._table.tokens[item.row, : item.fill_len],
            adapter_slot=_slot_of(req),
        )


def _slot_of(req: Req) -> int:
    if req.adapter is None:
        return NO_SLOT
    assert req.adapter.slot is not None, f"request {req.rid} holds a row, and its adapter {req.adapter.name} no slot"
    return req.adapter.slot


def _embeds(items: list[PrefillItem], first_slot: int) -> list[EmbeddedTokens]:
    """Of the tokens that the step computes, those that are given as embeddings."""
    found, slot = [], first_slot
    for item in items:
        if item.req.input_embeds is not None and item.start < item.req.prompt_len:
            found.append(EmbeddedTokens(slot, item.req.input_embeds[item.start : item.end]))
        slot += item.end - item.start
    return found
