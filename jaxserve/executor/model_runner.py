"""ModelRunner: the Runner that has a model. Packs steps, launches compiled programs, fetches what they sampled.

It owns the device state and the only copy of the weights; it knows rows and pages, not requests. Launching returns before
the step has run: the state is a chain of futures, so steps run in launch order without the host waiting for any of them.

It serves as soon as it has programs that are large enough for every step. Others come while it serves and are taken in between
two steps (`tend`); a step runs in the smallest program that is there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import numpy as np

from jaxserve.commands import Command
from jaxserve.executor import distributed, profiling
from jaxserve.executor.adapter_store import AdapterStore
from jaxserve.executor.background import BackgroundCompiler
from jaxserve.executor.commands import CommandThread
from jaxserve.executor.compile_counter import CompileCounter, counted
from jaxserve.executor.deal import Deal, Shards
from jaxserve.executor.expert_record import ExpertRecord
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.logit_lines import LogitsKey
from jaxserve.executor.pipeline import Pipeline
from jaxserve.executor.pooling import PoolingKey, num_pooled, padding_query, unpack_pooled
from jaxserve.executor.program_set import ProgramSet
from jaxserve.executor.programs import PAGE_UPDATE_CHUNK, ProgramKey, SamplingKey
from jaxserve.executor.row_params import NUM_ROW_PARAMS, has_limits, row_params_from_state
from jaxserve.executor.row_tables import needs_tables, pack_row, packed_row_shape
from jaxserve.executor.sampler import SampledTokens, SamplingMode
from jaxserve.executor.sampling import Forwarded
from jaxserve.executor.scoring import ScoredLines, ScoringKey, unpack_lines, unpack_scores
from jaxserve.executor.stage import Stage
from jaxserve.executor.step import Params
from jaxserve.executor.weights import WeightLoader
from jaxserve.handover import Handover
from jaxserve.runner import (
    NO_SLOT,
    NO_TOKEN_ID,
    AdapterLoad,
    EmbeddedTokens,
    LogitLines,
    PageUpdates,
    PoolQuery,
    RunnerSpec,
    ScoreQuery,
    StepInput,
    StepOutput,
)
from jaxserve.types import ForwardMode

K = TypeVar("K", ScoringKey, PoolingKey)

_NOTHING = np.zeros(0, np.int32)
_NO_PAGE_UPDATES = PageUpdates.of(_NOTHING, _NOTHING, _NOTHING)
_NO_STEP = StepInput(
    mode=ForwardMode.IDLE,
    rows=_NOTHING,
    seq_lens=_NOTHING,
    extend_lens=_NOTHING,
    num_decode_rows=0,
    input_ids=_NOTHING,
    sample=np.zeros(0, bool),
    page_updates=_NO_PAGE_UPDATES,
    new_rows=[],
    needs_sampling=False,
    needs_adjusting=False,
    needs_logprobs=False,
    needs_top_logprobs=False,
)
_SLOT, _NO_TOKEN = np.zeros(1, np.int32), np.full(1, NO_TOKEN_ID, np.int32)


@dataclasses.dataclass
class PendingStep:
    """A step whose forward pass was launched: what its sampling needs, then its device results."""

    sample: np.ndarray  # bool [R], as in its StepInput
    mode: SamplingMode
    needs_logprobs: bool
    needs_top_logprobs: bool
    is_larger: bool  # its forward pass runs in a larger program than it would if all were there
    deal: Deal  # which of the results are whose
    forwarded: Forwarded | None  # until it is sampled; None from the beginning where the model has no logits
    sampled: SampledTokens | None = None  # from then on
    score_query: ScoreQuery | None = None
    scored: list[ScoredLines] = dataclasses.field(default_factory=list)
    num_hidden: int = 0
    hidden: list[jax.Array] = dataclasses.field(default_factory=list)
    num_experts: int = 0  # tokens whose experts were asked for
    experts: list[jax.Array] = dataclasses.field(default_factory=list)
    pool_query: PoolQuery | None = None
    pooled: list[jax.Array] = dataclasses.field(default_factory=list)


class ModelRunner:
    def __init__(
        self,
        *,
        program_set: ProgramSet,
        stages: Sequence[Stage],
        later: BackgroundCompiler | None,
        spec: RunnerSpec,
        compile_counter: CompileCounter,
        loader: WeightLoader,
        model_path: str,
        load_format: str,
        expert_record: ExpertRecord,
        adapters: AdapterStore | None,
        handover: Handover | None,
        startup_s: dict[str, float],
    ) -> None:
        """`stages`: with the essential programs of the set, at least; what is missing comes from `later`, for a model with one
        stage. Weights of those here came from the folder `model_path`; `loader` is for those that replace them, unless they
        come through `handover`. `startup_s`: what it took to get all that."""
        self.spec = spec
        self._program_set = program_set
        self._later = self._background = later
        self._counter = compile_counter
        self._commands = CommandThread(self, loader, model_path, load_format, expert_record, adapters, handover)
        self._adapters = adapters
        self._command: Future[None] | None = None  # the newest
        self._shards = Shards.of(spec)
        self._row_params = np.zeros((spec.max_rows, NUM_ROW_PARAMS), np.int32)
        self._adapter_slots = np.full(spec.max_rows, NO_SLOT, np.int32)
        self._steps_in_larger_program = 0
        self._is_closed = False
        started_s = time.monotonic()
        self._pipeline = Pipeline(stages, spec)
        self._choose_programs()
        if not self._on_cpu:
            present = self._present
            self._run_once([key for key in program_set.all if key in present])  # in the same order on all hosts
        jax.block_until_ready([(stage.state, stage.sampling) for stage in self._pipeline.own])
        self._startup_s = startup_s | {"state and first runs": time.monotonic() - started_s}
        if later is not None:
            later.start()

    # --- programs

    @property
    def _drafts(self) -> bool:
        return self.spec.num_draft_tokens > 1

    @property
    def _present(self) -> set[ProgramKey]:
        """Programs that all stages have which need them."""
        return set().union(*(stage.keys for stage in self._pipeline.stages))

    @counted
    def tend(self) -> int:
        later, is_changing = self._later, self._command is not None and not self._command.done()
        if later is None or is_changing or self.params is None or self.kv_pool is None:
            return self.num_programs_missing
        while (arrived := later.take()) is not None:
            key, self._pipeline.own[-1].programs[key] = arrived
            self._choose_programs()
            if not self._on_cpu:
                self._run_once([key])
                break  # a round of the scheduler's loop is to stay short
        return self.num_programs_missing

    def _choose_programs(self) -> None:
        """Once the programs that are there have changed."""
        present = self._present
        self.num_programs_missing = len(self._program_set.all) - len(present)
        self._buckets, self._sampling_keys = self._program_set.served_by(present)
        for lines in {key.num_rows * key.tokens_per_row for key in self._sampling_keys}:
            self._pipeline.last.keep_no_masks(lines, self.spec.mask_words)
        if not self.num_programs_missing:
            self._later = None
            self._counter.mark_ready()

    def _run_once(self, keys: list[ProgramKey]) -> None:
        """With padding alone. What an accelerator does at a program's first run (loading, allocating) should not happen in
        front of a request. On CPU the first run costs a few milliseconds, and running all programs took seconds."""
        present, all_buckets = self._present, self._program_set.buckets.all  # these in one order on all hosts
        by_shape = {(bucket.total_rows, bucket.tokens_per_row): bucket for bucket in all_buckets if bucket in present}
        first, last = self._pipeline.first, self._pipeline.last
        for key in keys:
            match key:
                case Bucket():
                    self._forward_padding(key)
                case SamplingKey(num_rows, tokens_per_row):
                    bucket = by_shape[num_rows, tokens_per_row]
                    self._pipeline.sample(key, self._logits_of_padding(bucket), None, _NOTHING)
                case PoolingKey():
                    last.pool(key, padding_query(self._shards.padding_row), of_tokens=False)
                case LogitsKey(num_lines, writes):
                    bucket = next(bucket for (rows, each), bucket in by_shape.items() if rows * each == num_lines)
                    logits = self._logits_of_padding(bucket).logits
                    if writes:
                        last.write_logits(logits, LogitLines(_SLOT, np.zeros((1, self.spec.vocab_size), np.float32)))
                    else:
                        last.read_logits(logits, _SLOT)
                case ScoringKey():
                    last.score(key, ScoreQuery(_SLOT, _NO_TOKEN, _NO_TOKEN[:, None], needs_top=False))
                case "hidden_states":
                    last.copy_hidden(_SLOT)
                case "routed_experts":
                    last.copy_experts(_SLOT)
                case "input_embeds":
                    first.write_embeds(EmbeddedTokens(0, np.zeros((1, self.spec.hidden_size), np.float32)))
                case "page_table":
                    self._write_page_table(_NO_PAGE_UPDATES)
                case "row_tables":
                    last.write_row_tables([np.zeros(packed_row_shape(), np.int32)])
                case "history":
                    last.write_history(self._shards.padding_row, np.zeros(1, np.int32))
                case "adapter":
                    for stage in self._pipeline.own:
                        stage.write_no_adapter()

    # --- Runner

    @counted
    def forward(self, step: StepInput) -> PendingStep:
        assert self.params is not None and self.kv_pool is not None, "a step is launched while memory is released"
        pipeline = self._pipeline
        for load in step.adapter_loads:
            self._write_adapter(load)
        for state in step.new_rows:
            self._row_params[state.row] = row_params_from_state(state)
            self._adapter_slots[state.row] = state.adapter_slot
            if needs_tables(state):
                line = self._shards.line(state.row)
                pipeline.last.write_row_tables(pack_row(dataclasses.replace(state, row=line), self.spec.vocab_size))
            if self._drafts:
                pipeline.last.write_history(self._shards.line(state.row), state.token_ids)
        bucket = self._buckets.choose(step, self._shards)
        is_larger = self._later is not None and bucket != self._program_set.buckets.choose(step, self._shards)
        step = self._write_excess_page_updates(step, bucket)
        slots = self._adapter_slots[step.rows]
        if (slots != NO_SLOT).any():
            bucket = bucket.with_adapters
        deal = self._shards.deal(step, bucket)
        for embeds in step.embeds:
            (first_slot,) = deal.hidden_slots(np.array([embeds.first_slot], np.int32))
            pipeline.first.write_embeds(dataclasses.replace(embeds, first_slot=int(first_slot)))
        row_params = self._row_params[step.rows]
        forwarded = pipeline.forward(bucket, step.rows[: step.num_decode_rows], deal.pack(row_params, slots))
        mode = _sampling_mode(step, row_params)
        pending = PendingStep(step.sample, mode, step.needs_logprobs, step.needs_top_logprobs, is_larger, deal, forwarded)
        if (query := step.score_query) is not None:
            pending.score_query = query
            dealt = dataclasses.replace(query, slots=deal.hidden_slots(query.slots))
            pending.scored = pipeline.to_reader(pipeline.last.score(self._scoring_key(query), dealt))
        if step.hidden_slots is not None:
            slots = deal.hidden_slots(step.hidden_slots)
            pending.num_hidden, pending.hidden = len(slots), pipeline.to_reader(pipeline.last.copy_hidden(slots))
        if step.expert_slots is not None:
            slots = deal.hidden_slots(step.expert_slots)
            pending.num_experts, pending.experts = len(slots), pipeline.last.copy_experts(slots)
        if (asked := step.pool_query) is not None:
            assert self.spec.vectors is not None
            rows = np.array([self._shards.line(row) for row in asked.rows.tolist()], np.int32)
            here = dataclasses.replace(asked, rows=rows, first_slots=deal.hidden_slots(asked.first_slots))
            of_tokens = self.spec.vectors.of_tokens
            key = self._smallest(self._program_set.pooling, num_pooled(here, of_tokens=of_tokens))
            pending.pool_query = asked
            pending.pooled = pipeline.to_reader(pipeline.last.pool(key, here, of_tokens=of_tokens))
        return pending

    @counted
    def read_logits(self, handle: PendingStep, lines: np.ndarray) -> np.ndarray:
        assert handle.forwarded is not None, "logits are read before a step is sampled"
        pipeline, wanted = self._pipeline, handle.deal.logit_lines(lines)
        parts = pipeline.to_reader(pipeline.last.read_logits(handle.forwarded.logits, wanted))
        return np.concatenate([distributed.read(part) for part in parts])[: len(lines)]

    @counted
    def sample(self, handle: PendingStep, masks: np.ndarray | None = None, changed: LogitLines | None = None) -> None:
        if not self.spec.generates:
            return
        assert handle.forwarded is not None, "a step is sampled once"
        if changed is not None:
            lines = handle.deal.logit_lines(changed.lines)
            logits = self._pipeline.last.write_logits(handle.forwarded.logits, dataclasses.replace(changed, lines=lines))
            handle.forwarded = dataclasses.replace(handle.forwarded, logits=logits)
        mode = handle.mode if masks is None else handle.mode.with_masks
        key = self._key(handle.forwarded, mode)
        self._steps_in_larger_program += handle.is_larger or key.mode is not mode
        if masks is not None:
            masks = _for_all_rows(masks, key, handle.deal)
        handle.sampled = self._pipeline.sample(key, handle.forwarded, masks, handle.deal.step.rows)
        handle.forwarded = None
        if not self._on_cpu:
            for array in self._fetched(handle.sampled):
                distributed.start_reading(array)

    @counted
    def fetch(self, handle: PendingStep) -> StepOutput:
        sampled, lines = handle.sampled, handle.deal.lines
        has_top, read = handle.needs_top_logprobs, distributed.read
        self._pipeline.show_failure()
        if not self.spec.generates:
            nothing = np.zeros(len(handle.sample), np.int32)
            return StepOutput(nothing[:, None], nothing, pooled=self._pooled(handle))
        assert sampled is not None, "a step is fetched after it was sampled"
        return StepOutput(
            token_ids=read(sampled.token_ids)[lines],
            num_tokens=read(sampled.num_tokens)[lines] if self._drafts else handle.sample.astype(np.int32),
            logprobs=read(sampled.logprobs)[lines] if handle.needs_logprobs else None,
            top_ids=read(sampled.top_ids)[lines] if has_top else None,
            top_logprobs=read(sampled.top_logprobs)[lines] if has_top else None,
            drafts=read(sampled.drafts)[lines] if self._drafts else None,
            scores=None if handle.score_query is None else unpack_scores(handle.score_query, handle.scored),
            hidden_states=unpack_lines(handle.hidden, handle.num_hidden) if handle.num_hidden else None,
            experts=unpack_lines(handle.experts, handle.num_experts) if handle.num_experts else None,
            pooled=self._pooled(handle),
        )

    def _pooled(self, handle: PendingStep) -> np.ndarray | None:
        if handle.pool_query is None:
            return None
        assert self.spec.vectors is not None
        return unpack_pooled(handle.pool_query, handle.pooled, of_tokens=self.spec.vectors.of_tokens)

    def _fetched(self, sampled: SampledTokens) -> list[Any]:
        """What `fetch` always asks for. Without drafts the host knows how many tokens a row gains: each transfer costs."""
        return [sampled.token_ids, sampled.num_tokens, sampled.drafts] if self._drafts else [sampled.token_ids]

    @counted
    def execute(self, command: Command) -> Future[None]:
        self._command = self._commands.start(command)
        return self._command

    def close(self) -> None:
        """Gives the devices' memory back and ends the threads, where the process goes on; it waits for what they do just now.
        Nothing can be launched any more. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._background is not None:
            self._background.stop()
        self._later = None
        self._commands.close()
        self._pipeline.close()

    def annotate(self, name: str, **facts: Any) -> AbstractContextManager[Any]:
        return profiling.annotation(name, facts)

    def internal_state(self) -> dict[str, Any]:
        meshes = [stage.mesh for stage in self._pipeline.stages]
        devices = sum(mesh.devices.size for mesh in meshes)
        return {
            "device": f"{devices} x {meshes[0].devices.flat[0].device_kind}",
            "memory_usage": {
                "weight_gb": sum(leaf.nbytes for leaf in jax.tree.leaves(self.params)) / 1e9,
                "kvcache_gb": sum(leaf.nbytes for leaf in jax.tree.leaves(self.kv_pool)) / 1e9,
                "token_capacity": self.spec.max_total_tokens,
            },
            "buckets": [bucket.name for bucket in self._program_set.buckets.all],
            "compiles_total": self._counter.count,
            "compiles_after_ready_total": self._counter.after_ready,
            "startup_s": {what: round(took_s, 2) for what, took_s in self._startup_s.items()},
            "programs_missing": self.num_programs_missing,
            "fully_warm": not self.num_programs_missing,
            "steps_in_larger_program_total": self._steps_in_larger_program,
        }

    # --- what commands change (`DeviceContents`)

    @property
    def params(self) -> tuple[Params, ...] | None:
        return _all_or_none([stage.params for stage in self._pipeline.own])

    @params.setter
    def params(self, params: tuple[Params, ...] | None) -> None:
        for index, stage in enumerate(self._pipeline.own):
            stage.params = None if params is None else params[index]

    @property
    def kv_pool(self) -> tuple[Any, ...] | None:
        return _all_or_none([stage.state.kv for stage in self._pipeline.own])

    @kv_pool.setter
    def kv_pool(self, kv_pool: tuple[Any, ...] | None) -> None:
        for index, stage in enumerate(self._pipeline.own):
            stage.state = dataclasses.replace(stage.state, kv=None if kv_pool is None else kv_pool[index])

    @property
    def expert_counts(self) -> np.ndarray | None:
        counts = _all_or_none([stage.state.expert_counts for stage in self._pipeline.own])
        return None if counts is None else np.concatenate([np.asarray(of_stage) for of_stage in counts])

    def empty_kv_pool(self) -> tuple[Any, ...]:
        return tuple(stage.programs["kv_pool"]() for stage in self._pipeline.own)

    # --- inside

    @property
    def _on_cpu(self) -> bool:
        return self._pipeline.own[0].on_cpu

    def _logits_of_padding(self, bucket: Bucket) -> Forwarded:
        """Of a step without a live row."""
        forwarded = self._forward_padding(bucket)
        assert forwarded is not None, "this model has no logits"
        return forwarded

    def _forward_padding(self, bucket: Bucket) -> Forwarded | None:
        packed = self._shards.deal(_NO_STEP, bucket).pack(np.zeros((0, NUM_ROW_PARAMS), np.int32), _NOTHING)
        return self._pipeline.forward(bucket, _NOTHING, packed)

    def _key(self, forwarded: Forwarded, mode: SamplingMode) -> SamplingKey:
        """The program that samples so."""
        num_rows, tokens_per_row = forwarded.inputs.shape
        return self._sampling_keys[SamplingKey(num_rows, tokens_per_row, mode)]

    def _scoring_key(self, query: ScoreQuery) -> ScoringKey:
        return self._smallest(self._program_set.scoring, len(query.slots))

    def _smallest(self, keys: Sequence[K], num_lines: int) -> K:
        """The smallest program that is there and answers in one call, or the largest."""
        present = [key for key in keys if key in self._pipeline.last.keys]
        return next((key for key in present if key.num_lines >= num_lines), present[-1])

    def _write_adapter(self, load: AdapterLoad) -> None:
        assert self._adapters is not None, "this runner has no slots for adapters"
        for stage, filled in zip(self._pipeline.own, self._adapters.filled(load.adapter_id), strict=True):
            stage.write_adapter(load.slot, filled)

    def _write_page_table(self, updates: PageUpdates) -> None:
        self._pipeline.write_page_table(self._shards.pack_page_updates(updates, PAGE_UPDATE_CHUNK))

    def _write_excess_page_updates(self, step: StepInput, bucket: Bucket) -> StepInput:
        """Long prefix hits bring more page-table entries than a step has room for: those go ahead of it."""
        updates = step.page_updates
        is_beyond = self._shards.beyond(updates, bucket.num_page_updates)
        if is_beyond is None:
            return step
        ahead = updates[is_beyond]
        for start in range(0, len(ahead), PAGE_UPDATE_CHUNK):
            self._write_page_table(ahead[start : start + PAGE_UPDATE_CHUNK])
        return dataclasses.replace(step, page_updates=updates[~is_beyond])


def _all_or_none(of_stages: Sequence[Any]) -> tuple[Any, ...] | None:
    """What stages have all, or none of them."""
    return None if of_stages[0] is None else tuple(of_stages)


def _sampling_mode(step: StepInput, row_params: np.ndarray) -> SamplingMode:
    return SamplingMode.of(
        draws=step.needs_sampling,
        limits=has_limits(row_params),
        everything=step.needs_adjusting or step.needs_logprobs or step.needs_top_logprobs,
    )


def _for_all_rows(masks: np.ndarray, key: SamplingKey, deal: Deal) -> np.ndarray:
    """int32 [R * K, W] of a program, from those of the step's rows [r, K, W]; padding rows may sample what they like."""
    if len(masks) < key.num_rows or deal.shards.count > 1:
        of_all = np.full((key.num_rows, *masks.shape[1:]), -1, np.int32)
        of_all[deal.lines] = masks
        masks = of_all
    return masks.reshape(-1, masks.shape[-1])
