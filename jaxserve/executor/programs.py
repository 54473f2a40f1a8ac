"""StepPrograms: the jitted functions a runner launches, and the shapes they are compiled for. Holds no arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.executor.compiler_options import compiler_options
from jaxserve.executor.forward_batch import Bucket, packed_len
from jaxserve.executor.input_embeds import EMBED_LINES, write_own_embeds
from jaxserve.executor.kv_cache import KVCacheLayout
from jaxserve.executor.logit_lines import MOVED_LINES, LogitsKey, read_logits, write_logits
from jaxserve.executor.mesh import platform_of, spans_processes
from jaxserve.executor.ngram import NgramDrafter
from jaxserve.executor.pooling import LINE_FIELDS, PooledLines, PoolingKey, keeps_sums, pool_lines
from jaxserve.executor.row_params import NUM_ROW_PARAMS
from jaxserve.executor.row_tables import RowTables, packed_row_shape, write_row
from jaxserve.executor.sampler import SampledTokens, SamplingMode
from jaxserve.executor.sampling import Continuation, Forwarded, Sampled, SamplingState, sample_rows
from jaxserve.executor.scoring import (
    HIDDEN_LINES,
    IDS_PER_LINE,
    ScoredLines,
    ScoringKey,
    StepHidden,
    copy_lines,
    of_all_shards,
    score_lines,
)
from jaxserve.executor.step import AdaptedParams, ForwardState, HandedOn, Params, RowInputs, Step, write_own_pages
from jaxserve.kernels.native.attention import NativeAttention
from jaxserve.kernels.native.zero_pages import zero_pages
from jaxserve.models import DATA_AXIS
from jaxserve.models.adapters.layout import AdapterLayout, write_slot
from jaxserve.runner import NO_SLOT, RunnerSpec

# Page-table entries written by one call of the program for what does not fit a step's own updates (long prefix hits).
PAGE_UPDATE_CHUNK = 1024

# Tokens of a sequence written by one call of the program that brings a row's history to the device.
HISTORY_CHUNK = 1024

_WHOLE, _BY_SHARD = PartitionSpec(), PartitionSpec(DATA_AXIS)


class SamplingKey(NamedTuple):
    """What a sampling program is compiled for."""

    num_rows: int
    tokens_per_row: int
    mode: SamplingMode

    @property
    def name(self) -> str:
        tokens = f" K={self.tokens_per_row}" if self.tokens_per_row > 1 else ""
        return f"sample {self.mode.name.lower()} R={self.num_rows}{tokens}"

    @staticmethod
    def of(bucket: Bucket, mode: SamplingMode) -> SamplingKey:
        return SamplingKey(bucket.total_rows, bucket.tokens_per_row, mode)

    @staticmethod
    def all_of(buckets: Iterable[Bucket], modes: Iterable[SamplingMode] = SamplingMode) -> list[SamplingKey]:
        """Those that steps of these buckets can need."""
        shapes = sorted({(bucket.total_rows, bucket.tokens_per_row) for bucket in buckets})
        return [SamplingKey(*shape, mode) for shape in shapes for mode in modes]

    @staticmethod
    def largest_of(buckets: Iterable[Bucket]) -> SamplingKey:
        """The one that takes most memory."""
        widest = max(buckets, key=lambda bucket: bucket.total_rows * bucket.tokens_per_row)
        return SamplingKey.of(widest, SamplingMode.EVERYTHING)


# A step's forward half, its sampling half, what moves logits between them, what scores its tokens or makes vectors of them, or
# the name of what there is one of: StepPrograms.lower_<name>.
ProgramKey: TypeAlias = Bucket | SamplingKey | LogitsKey | ScoringKey | PoolingKey | str


def program_name(key: ProgramKey) -> str:
    """What a program is called in logs and reports."""
    return key.replace("_", " ") if isinstance(key, str) else key.name


class StepPrograms:
    def __init__(
        self,
        step: Step,
        param_specs: Any,
        kv_cache: KVCacheLayout,
        spec: RunnerSpec,
        mesh: Mesh,
        drafter: NgramDrafter | None = None,
        adapters: AdapterLayout | None = None,
    ) -> None:
        """`adapters`: the slots, where steps may use some."""
        self._step = step
        self._param_specs = param_specs
        self._kv_cache = kv_cache
        self._spec = spec
        self._mesh = mesh
        self._drafter = drafter
        self._adapters = adapters
        hidden = _BY_SHARD if self._keeps_hidden else None
        counts = _WHOLE if step.counts_experts else None
        slots = _BY_SHARD if self._adapts_head else None
        experts = _BY_SHARD if step.returns_experts else None
        self._state_specs = ForwardState(kv_cache.specs(), _BY_SHARD, hidden, counts, slots, experts)  # type: ignore[arg-type]

    def lower(self, key: ProgramKey, params: Params) -> Any:
        """A jax.stages.Lowered. `params` may be shapes with shardings."""
        if isinstance(key, Bucket):
            return self.lower_forward(key, params)
        if isinstance(key, SamplingKey):
            return self.lower_sampling(key)
        if isinstance(key, LogitsKey):
            return self.lower_logit_lines(key)
        if isinstance(key, ScoringKey):
            return self.lower_scoring(key, params)
        if isinstance(key, PoolingKey):
            return self.lower_pooling(key, params)
        return getattr(self, f"lower_{key}")()

    def lower_forward(self, bucket: Bucket, params: Params) -> Any:
        """A jax.stages.Lowered of (params, forward state, continuation, packed) -> (forward state, Forwarded); of a pipeline's
        stage of (params, forward state, HandedOn, packed) if it is not the first, and -> (forward state, HandedOn) if it is not
        the last. With adapters, AdaptedParams stand in place of params. Of a model without logits there is None for Forwarded.

        `params` may be shapes with shardings.
        """
        config = self._step.decoder.config
        weights, specs = self._adapted(params) if bucket.adapts else (params, self._param_specs)

        def run(params: Params | AdaptedParams, state: ForwardState, start: Continuation | HandedOn, packed: jax.Array) -> Any:
            return self._step(params, state, start, packed, bucket)

        handed_on: Any = HandedOn(_BY_SHARD, None if self._drafter is None else _WHOLE)  # type: ignore[arg-type]
        start = self.continuation() if config.embeds else self._handed_on(bucket)
        made = _WHOLE if config.generates else None
        sharded = self._sharded(
            run,
            (specs, self._state_specs, _WHOLE if config.embeds else handed_on, _WHOLE),
            (self._state_specs, made if config.has_head else handed_on),
        )
        packed = self._whole((packed_len(bucket),))
        return self._jit(sharded, donated=1).lower(weights, self._forward_state(), start, packed)

    def lower_sampling(self, key: SamplingKey) -> Any:
        """Of (sampling state, Forwarded, masks) -> (sampling state, Sampled); masks None in modes that take none."""
        mode, spec, drafter = key.mode, self._spec, self._drafter

        def run(state: SamplingState, forwarded: Forwarded, masks: jax.Array | None) -> tuple[SamplingState, Sampled]:
            state, tokens = sample_rows(state, forwarded, masks, mode, spec, drafter)
            return state, Sampled(tokens, state.continuation if spec.num_stages > 1 else None)

        num_lines = key.num_rows * key.tokens_per_row
        masks = self._whole((num_lines, self._spec.mask_words)) if mode.takes_masks else None
        return self._jit(run, donated=0).lower(self._sampling_state(), self._forwarded(key.num_rows, key.tokens_per_row), masks)

    def lower_logit_lines(self, key: LogitsKey) -> Any:
        """Of (logits, int32 [MOVED_LINES]) -> those lines, or of (logits, lines, logits of the lines) -> logits."""
        logits, lines = self._whole((key.num_lines, self._spec.vocab_size), jnp.float32), self._whole((MOVED_LINES,))
        if not key.writes:
            return self._jit(read_logits).lower(logits, lines)
        changed = self._whole((MOVED_LINES, self._spec.vocab_size), jnp.float32)
        return self._jit(write_logits, donated=0).lower(logits, lines, changed)

    def lower_scoring(self, key: ScoringKey, params: Params) -> Any:
        """Of (params, StepHidden, int32 [lines, 2 + IDS_PER_LINE]) -> ScoredLines; where adapters change the output head of
        AdaptedParams."""
        decoder, num_top = self._step.decoder, self._spec.max_top_logprobs
        weights, specs = self._adapted(params) if self._adapts_head else (params, self._param_specs)

        def run(params: Params | AdaptedParams, hidden: StepHidden, packed: jax.Array) -> Any:
            if isinstance(params, AdaptedParams):
                return score_lines(decoder, params.params, params.adapters.lm_head, hidden, packed, num_top)
            return score_lines(decoder, params, None, hidden, packed, num_top)

        sharded = self._sharded(run, (specs, _BY_SHARD, _WHOLE), _WHOLE)
        packed, state = self._whole((key.num_lines, 2 + IDS_PER_LINE)), self._forward_state()
        return self._jit(sharded).lower(weights, StepHidden(state.hidden, state.adapter_slots), packed)  # type: ignore[arg-type]

    def lower_pooling(self, key: PoolingKey, params: Params) -> Any:
        """Of (params, hidden states, sums, `pack_pooling`'s lines) -> PooledLines. Sums may be None."""
        decoder, sums = self._step.decoder, self.pooled_sums()

        def run(params: Params, hidden: jax.Array, sums: jax.Array | None, packed: jax.Array) -> PooledLines:
            return pool_lines(decoder, params, hidden, sums, packed)

        of_sums = None if sums is None else _WHOLE
        made: Any = PooledLines(of_sums, _WHOLE)  # type: ignore[arg-type]
        sharded = self._sharded(run, (self._param_specs, _BY_SHARD, of_sums, _WHOLE), made)
        packed = self._whole((key.num_lines, LINE_FIELDS))
        return self._jit(sharded, donated=2).lower(params, self._forward_state().hidden, sums, packed)

    def lower_pooled_sums(self) -> Any:
        """Of () -> sums, in zeros."""
        shape = self.pooled_sums()
        assert shape is not None
        return jax.jit(lambda: _zeros(shape), out_shardings=shape.sharding).lower()

    def pooled_sums(self) -> Any:
        """A shape with a sharding: a line for each row. None where texts do not come in parts."""
        config = self._step.decoder.config
        if not keeps_sums(config):
            return None
        return self._whole((self._num_rows, len(config.pooling.kinds) * config.hidden_size), jnp.float32)

    def lower_hidden_states(self) -> Any:
        """Of (hidden states, int32 [HIDDEN_LINES] slots) -> float32 [HIDDEN_LINES, hidden size]."""
        sharded = self._sharded(copy_lines, (_BY_SHARD, _WHOLE), _WHOLE)
        return self._jit(sharded).lower(self._forward_state().hidden, self._whole((HIDDEN_LINES,)))

    def lower_routed_experts(self) -> Any:
        """Of (experts of tokens, int32 [HIDDEN_LINES] slots) -> int32 [HIDDEN_LINES, layers with experts, K]."""
        sharded = self._sharded(of_all_shards, (_BY_SHARD, _WHOLE), _WHOLE)
        return self._jit(sharded).lower(self._forward_state().experts, self._whole((HIDDEN_LINES,)))

    def lower_input_embeds(self) -> Any:
        """Of (hidden states, int32 [1] slot, float32 [EMBED_LINES, hidden size]) -> hidden states."""
        hidden = self._forward_state().hidden
        lines = self._whole((EMBED_LINES, self._spec.hidden_size), jnp.float32)
        sharded = self._sharded(write_own_embeds, (_BY_SHARD, _WHOLE, _WHOLE), _BY_SHARD)
        return self._jit(sharded, donated=0).lower(hidden, self._whole((1,)), lines)

    def lower_history(self) -> Any:
        """Of (history, int32 [2 + HISTORY_CHUNK]: row, start, tokens) -> history. Only where drafts are looked up."""
        return self._jit(write_history, donated=0).lower(self._sampling_state().history, self._whole((2 + HISTORY_CHUNK,)))

    def lower_page_table(self) -> Any:
        """Of (page table, int32 [3, PAGE_UPDATE_CHUNK]) -> page table."""
        updates = self._whole((3, PAGE_UPDATE_CHUNK))
        sharded = self._sharded(write_own_pages, (_BY_SHARD, _WHOLE), _BY_SHARD)
        return self._jit(sharded, donated=0).lower(self._forward_state().page_table, updates)

    def lower_row_tables(self) -> Any:
        """Of (row tables, a packed row) -> row tables."""
        return self._jit(write_row, donated=0).lower(self._sampling_state().tables, self._whole(packed_row_shape()))

    def lower_kv_pool(self) -> Any:
        """Of () -> an empty pool, for when the first one was given back."""
        shapes = self._forward_state().kv
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        return jax.jit(lambda: self._empty_pool(shapes), out_shardings=shardings).lower()

    def lower_empty_adapters(self) -> Any:
        """Of () -> slots, in zeros."""
        shapes = self.adapter_shapes()
        return jax.jit(lambda: _zeros(shapes), out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes)).lower()

    def lower_adapter(self) -> Any:
        """Of (slots, int32 [] slot, what goes into it) -> slots."""
        shapes = self.adapter_shapes()
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        write = jax.jit(write_slot, donate_argnums=0, out_shardings=shardings, compiler_options=self.compiler_options)
        return write.lower(shapes, self._whole(()), self.filled_slot_shapes())

    def _adapted(self, params: Params) -> tuple[AdaptedParams, Any]:
        """Shapes, and specs."""
        assert self._adapters is not None, "this model has no slots for adapters"
        return AdaptedParams(params, self.adapter_shapes()), AdaptedParams(self._param_specs, self._adapters.specs())

    @property
    def _adapts_head(self) -> bool:
        return self._adapters is not None and self._adapters.lm_head is not None

    def adapter_shapes(self) -> Any:
        """Of all slots, ShapeDtypeStructs with shardings."""
        assert self._adapters is not None
        return jax.tree.map(self._shape, self._adapters.shapes(), self._adapters.specs())

    def filled_slot_shapes(self) -> Any:
        """Of what goes into one slot, likewise."""
        assert self._adapters is not None
        return jax.tree.map(self._shape, self._adapters.slot_shapes(), self._adapters.slot_specs())

    def outputs(self, key: ProgramKey) -> Any:
        """ShapeDtypeStructs with shardings of what a program gives beside states: to be received by those who do not run it."""
        match key:
            case Bucket():
                config = self._step.decoder.config
                if not config.has_head:
                    return self._handed_on(key)
                return self._forwarded(key.total_rows, key.tokens_per_row) if config.generates else None
            case SamplingKey():
                return self._sampled(key)
            case LogitsKey(num_lines, writes):
                return self._whole((num_lines if writes else MOVED_LINES, self._spec.vocab_size), jnp.float32)
            case ScoringKey(num_lines):
                line, lines = self._whole((num_lines,), jnp.float32), (num_lines, self._spec.max_top_logprobs)
                asked = self._whole((num_lines, IDS_PER_LINE), jnp.float32)
                return ScoredLines(line, self._whole(lines), self._whole(lines, jnp.float32), asked)
            case PoolingKey(num_lines):
                return self._whole((num_lines, self._step.decoder.config.pooled_size), jnp.float32)
        assert key == "hidden_states", f"{program_name(key)} gives nothing but states"
        return self._whole((HIDDEN_LINES, self._spec.hidden_size), jnp.float32)

    def state_shapes(self) -> tuple[ForwardState, SamplingState | None]:
        """ShapeDtypeStructs with shardings in place of arrays; the latter where tokens are sampled."""
        config = self._step.decoder.config
        return self._forward_state(), self._sampling_state() if config.makes_logits else None

    def continuation(self) -> Continuation:
        """Of shapes with shardings."""
        lengths = None if self._drafter is None else self._whole((self._num_rows,))
        return Continuation(self._whole((self._num_rows, self._spec.num_draft_tokens)), lengths)

    def lower_empty_state(self) -> Any:
        """Of () -> both states, in zeros."""
        shapes = self.state_shapes()
        forward, sampling = shapes

        def run() -> tuple[ForwardState, SamplingState | None]:
            kept = forward.page_table, forward.hidden, forward.expert_counts, forward.experts
            page_table, hidden, counts, experts = _zeros(kept)
            slots = jax.tree.map(lambda shape: jnp.full(shape.shape, NO_SLOT, shape.dtype), forward.adapter_slots)
            if self._spec.num_snapshots:  # no page has one
                tables = page_table.reshape(self._spec.num_shards, self._spec.num_tables, -1)
                page_table = tables.at[:, -1].set(-1).reshape(page_table.shape)
            return ForwardState(self._empty_pool(forward.kv), page_table, hidden, counts, slots, experts), _zeros(sampling)

        return jax.jit(run, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes)).lower()

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        config = self._step.decoder.config
        return compiler_options(
            platform_of(self._mesh),
            quantized=config.quantization is not None,
            several_processes=spans_processes(self._mesh),
            deterministic=config.batch_invariant,
        )

    def _jit(self, function: Any, *, donated: int | tuple[int, ...] = ()) -> Any:
        return jax.jit(function, donate_argnums=donated, compiler_options=self.compiler_options)

    def _sharded(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @property
    def _num_rows(self) -> int:
        """Lines of what has one for each row: the request rows of each shard, and one behind them for padding."""
        return self._spec.max_rows + self._spec.num_shards

    def _forward_state(self) -> ForwardState:
        kv = jax.tree.map(self._shape, self._kv_cache.shapes(), self._kv_cache.specs())
        page_table = self._by_shard((self._spec.num_tables * self._num_rows, self._spec.max_pages_per_row))
        config, spec = self._step.decoder.config, self._spec
        hidden = self._hidden_states(spec.num_shards * spec.max_slots) if self._keeps_hidden else None
        counts_shape = (len(config.own_sparse_layers), config.num_experts)
        counts = self._whole(counts_shape, jnp.uint32) if self._step.counts_experts else None
        slots = self._by_shard((spec.num_shards * spec.max_slots,)) if self._adapts_head else None
        experts = self._experts(spec.num_shards * spec.max_slots) if self._step.returns_experts else None
        return ForwardState(kv, page_table, hidden, counts, slots, experts)

    @property
    def _keeps_hidden(self) -> bool:
        config = self._step.decoder.config
        return config.embeds or config.has_head

    def _hidden_states(self, num_slots: int) -> Any:
        """Of so many tokens of all shards."""
        return self._by_shard((num_slots, self._step.decoder.config.hidden_size), jnp.dtype(self._step.attention.spec.dtype))

    def _experts(self, num_slots: int) -> Any:
        """Of so many tokens of all shards."""
        config = self._step.decoder.config
        return self._by_shard((num_slots, len(config.own_sparse_layers), config.experts_per_token))

    def _handed_on(self, bucket: Bucket) -> HandedOn:
        rows = bucket.num_shards, bucket.num_rows
        inputs = RowInputs(self._whole((*rows, bucket.tokens_per_row)), self._whole(rows))
        x = self._hidden_states(bucket.num_shards * bucket.num_tokens)
        return HandedOn(x, None if self._drafter is None else inputs)

    def _forwarded(self, num_rows: int, tokens_per_row: int) -> Forwarded:
        line = self._whole((num_rows,))
        return Forwarded(
            logits=self._whole((num_rows * tokens_per_row, self._spec.vocab_size), jnp.float32),
            inputs=self._whole((num_rows, tokens_per_row)),
            rows=line,
            seq_lens=line,
            extend_lens=line,
            sample=line,
            row_params=self._whole((num_rows, NUM_ROW_PARAMS)),
        )

    def _sampled(self, key: SamplingKey) -> Sampled:
        shape = key.num_rows, key.tokens_per_row
        tokens = SampledTokens(self._whole(shape))
        if key.mode is SamplingMode.EVERYTHING:
            best = (*shape, self._spec.max_top_logprobs)
            tokens = dataclasses.replace(
                tokens,
                logprobs=self._whole(shape, jnp.float32),
                top_ids=self._whole(best),
                top_logprobs=self._whole(best, jnp.float32),
            )
        if self._drafter is not None:
            drafts = self._whole((key.num_rows, self._spec.num_draft_tokens - 1))
            tokens = dataclasses.replace(tokens, num_tokens=self._whole((key.num_rows,)), drafts=drafts)
        return Sampled(tokens, self.continuation() if self._spec.num_stages > 1 else None)

    def _sampling_state(self) -> SamplingState:
        tables = RowTables.shapes(self._num_rows, self._spec.vocab_size)
        history = None if self._drafter is None else self._whole((self._num_rows, self._spec.context_len))
        return SamplingState(self.continuation(), jax.tree.map(lambda shape: self._shape(shape, _WHOLE), tables), history)

    def _empty_pool(self, shapes: Any) -> Any:
        """Where attention is in C++, its library is there. A custom call's array would be whole on each device of a mesh."""
        is_lazy = self._step.attention.name == NativeAttention.name and self._mesh.size == 1
        return jax.tree.map(zero_pages, shapes) if is_lazy else _zeros(shapes)

    def _whole(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return self._shape(jax.ShapeDtypeStruct(shape, dtype), _WHOLE)

    def _by_shard(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return self._shape(jax.ShapeDtypeStruct(shape, dtype), _BY_SHARD)

    def _shape(self, shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self._mesh, spec))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def write_history(history: jax.Array, packed: jax.Array) -> jax.Array:
    """Writes a chunk of one row's tokens; what is behind the sequence's end is dropped or overwritten before it is read."""
    row, start, tokens = packed[0], packed[1], packed[2:]
    return history.at[row, start + jnp.arange(len(tokens))].set(tokens, mode="drop")
