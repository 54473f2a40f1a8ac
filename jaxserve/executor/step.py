"""The forward half of the step: a pure function of (weights, state, what rows go on from, packed batch).

It runs the model inside one `jax.shard_map` over the mesh, so models and kernels see their shard and name their collectives;
what is not sharded (rows, tokens, logits) is computed alike on every device. With attention by data parallelism each shard, a
place along the mesh's "data", has rows, tokens and pages of its own; logits of all rows are on every device. They go to the
sampling half (`sampling`), a program of its own because the two vary with different things: the forward pass with tokens and
rows, sampling with rows and what the requests ask for. Each half's state is donated to it and comes back updated in place.

Of a pipeline each stage has a forward half of its own, over its own mesh and its own layers. All get the same packed batch; the
first embeds and knows what rows go on from, each hands on hidden states, and the last one makes logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxserve.executor.attention_chunks import AttentionRows, chunk_rows
from jaxserve.executor.forward_batch import NUM_DECODE_ROWS, Bucket, ForwardBatch, TokenPlacement, place_tokens, unpack
from jaxserve.executor.input_embeds import with_given
from jaxserve.executor.kv_cache import KVPool, PagesAndStates
from jaxserve.executor.sampling import Continuation, Forwarded
from jaxserve.executor.state_rows import StateLines, plan_states
from jaxserve.kernels.api import AttentionBackend, AttentionMetadata, LatentBackend
from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.models import DATA_AXIS, AllHere, Decoder, GatherAll, OfAllShards, PackAll, StepContext, own_lines
from jaxserve.models.adapters.low_rank import AdapterSlots, StepAdapters
from jaxserve.models.blocks.attend import HeadInputs, Inputs, LatentInputs, Mixer, StateInputs
from jaxserve.models.specs import AttentionMixer, SelfAttentionSpec, StateMixer
from jaxserve.runner import NO_SLOT

Params = dict[str, Any]


class AdaptedParams(NamedTuple):
    """What a step whose rows may use LoRA adapters has in place of weights."""

    params: Params
    adapters: AdapterSlots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardState:
    """What the forward half keeps on the device, of each shard. Of each group's rows in the page table the last is that of
    padding rows."""

    kv: Any  # the backend's arrays [pages of all layers, *page shape], each KV group has its part of them; or PagesAndStates
    page_table: jax.Array  # int32 [groups * (max_rows + 1), max_pages_per_row]: group by group, all rows of each
    hidden: jax.Array | None  # [slots, hidden size] behind the final norm, of the newest step's tokens: for `scoring` and
    # `pooling` where logits are made, and where tokens are embedded for `input_embeds`
    expert_counts: jax.Array | None = None  # uint32 [layers with experts, experts]: tokens that went to each, if recorded
    adapter_slots: jax.Array | None = None  # int32 [slots] of the newest step's tokens, where adapters change the output head
    experts: jax.Array | None = None  # int32 [slots, layers with experts, K] of the newest step's tokens, if they are told


class RowInputs(NamedTuple):
    """What the rows of a step go on from, of all D shards with R rows each."""

    tokens: jax.Array  # int32 [D, R, K]
    lengths: jax.Array | None  # int32 [D, R] tokens in the row's KV cache; None where nothing drafts: the host knows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HandedOn:
    """What a stage of a pipeline gives to the next."""

    x: jax.Array  # [T, hidden size], of each shard
    inputs: RowInputs | None  # None where nothing drafts: only who embeds needs the tokens


@dataclasses.dataclass(frozen=True)
class Step:
    """The static half of the step."""

    decoder: Decoder
    attention: AttentionBackend | LatentBackend
    pools: Mapping[int | None, KVPool]  # of each KV group, by its layers' window
    page_size: int
    rows_per_shard: int  # of tables: a line for each request row and one for padding
    counts_experts: bool = False
    returns_experts: bool = False
    num_state_lines: int = 0  # of each layer that keeps states
    states_per_row: int = 1
    keeps_snapshots: bool = False  # of states, behind pages: then the last table says where

    def __call__(
        self,
        params: Params | AdaptedParams,
        state: ForwardState,
        start: Continuation | HandedOn,
        packed: jax.Array,
        bucket: Bucket,
    ) -> tuple[ForwardState, HandedOn | Forwarded | None]:
        """`start`: what the stage before has made, or in the first stage what rows go on from. None: the model is for vectors,
        which are made of `state.hidden`."""
        held = None
        if isinstance(params, AdaptedParams):
            params, held = params
        # Of all shards, [D, ...], as sampling wants them; then of this one.
        batches = unpack(packed, bucket)
        rows = batches.rows + self._first_rows(bucket)
        inputs = _row_inputs(start, rows, bucket)
        if inputs.lengths is not None:
            batches = jax.vmap(_count_drafts)(batches, inputs.tokens, inputs.lengths)
        shard = jax.lax.axis_index(DATA_AXIS) if bucket.num_shards > 1 else 0
        batch = jax.tree.map(lambda field: field[shard], batches)
        page_table = write_page_table(state.page_table, batch.page_updates)
        placement, token_ids, of_all, slots = _place(batches, inputs.tokens, bucket, shard)
        # Of one group the whole: jnp.split would add an operation.
        num_tables = len(self.pools) + self.keeps_snapshots
        tables = jnp.split(page_table, num_tables) if num_tables > 1 else [page_table]
        snapshots = tables.pop() if self.keeps_snapshots else None
        plans = {
            window: self._plan_attention(batch, placement, table, bucket, window)
            for window, table in zip(self.pools, tables, strict=True)
        }

        state_rows = None
        if isinstance(state.kv, PagesAndStates):
            lines = StateLines(len(tables[0]), self.states_per_row, self.page_size)
            state_rows = plan_states(batch, placement, bucket, snapshots, lines)

        def attend(inputs: Inputs, kv: Any, layer: Mixer, index: jax.Array) -> tuple[jax.Array, Any]:
            if isinstance(inputs, StateInputs):
                assert state_rows is not None
                out, states = inputs.update(kv.states, state_rows.at(index * self.num_state_lines))
                return out, kv._replace(states=states)
            assert not isinstance(layer, StateMixer)
            plan, offset = plans[layer.kv_window], self.pools[layer.kv_window].page_offset(index)
            if state_rows is None:
                return self._attend(inputs, kv, layer, plan, offset)
            out, pages = self._attend(inputs, kv.pages, layer, plan, offset)
            return out, kv._replace(pages=pages)

        told = {"counts_experts": self.counts_experts, "returns_experts": self.returns_experts}
        context = self.decoder.context(placement.positions, placement.is_live, of_all=of_all, **told)
        adapters = None if held is None or slots is None else StepAdapters.of(held, slots.own, slots.of_all)
        x = start.x if isinstance(start, HandedOn) else self._embed(params, state, batch, token_ids, context, adapters)
        hidden, kv, counts, experts = self.decoder.forward(params, x, context, state.kv, attend, adapters)
        state = dataclasses.replace(state, kv=kv, page_table=page_table)
        if counts is not None:
            assert state.expert_counts is not None
            state = dataclasses.replace(state, expert_counts=state.expert_counts + counts.astype(jnp.uint32))
        if experts is not None:
            assert state.experts is not None
            state = dataclasses.replace(state, experts=jax.lax.dynamic_update_slice(state.experts, experts, (0, 0, 0)))
        if not self.decoder.config.has_head:
            return state, HandedOn(hidden, None if inputs.lengths is None else inputs)
        if not self.decoder.config.generates:
            return self._with_hidden(state, hidden, bucket, slots), None
        with jax.named_scope("logits"):
            sampled = _sampled_tokens(hidden, placement, bucket)
            gather = AllHere().gather if bucket.num_shards == 1 else GatherAll().gather
            of_head = None if adapters is None else adapters.held.lm_head
            head_slots = None
            if adapters is not None and of_head is not None:
                head_slots = gather(_sampled_tokens(adapters.own.slots, placement, bucket))
            logits = self.decoder.logits(params, gather(sampled), of_head, head_slots)
        of_rows = (inputs.tokens, rows, batches.seq_lens, batches.extend_lens, batches.sample, batches.row_params)
        forwarded = Forwarded(logits, *(field.reshape(-1, *field.shape[2:]) for field in of_rows))
        return self._with_hidden(state, hidden, bucket, slots), forwarded

    def _with_hidden(self, state: ForwardState, hidden: jax.Array, bucket: Bucket, slots: OfTokens | None) -> ForwardState:
        """With what the step leaves behind of its tokens."""
        assert state.hidden is not None
        state = dataclasses.replace(state, hidden=jax.lax.dynamic_update_slice(state.hidden, hidden, (0, 0)))
        if state.adapter_slots is None:
            return state
        own = jnp.full(bucket.num_tokens, NO_SLOT, jnp.int32) if slots is None else slots.own
        return dataclasses.replace(state, adapter_slots=jax.lax.dynamic_update_slice(state.adapter_slots, own, (0,)))

    def _embed(
        self,
        params: Params,
        state: ForwardState,
        batch: ForwardBatch,
        token_ids: OfTokens,
        context: StepContext,
        adapters: StepAdapters | None,
    ) -> jax.Array:
        x = self.decoder.embed(params, token_ids.of_all, context, adapters)
        if batch.input_ids is None:
            return x
        given, config = state.hidden, self.decoder.config
        assert given is not None
        if config.scales_given_embeddings:
            given = given * jnp.asarray(config.embedding_scale, given.dtype)
        return with_given(x, token_ids.own, given)

    def _first_rows(self, bucket: Bucket) -> jax.Array:
        """int32 [D, 1]: where each shard's rows begin in tables of all of them."""
        return jnp.arange(bucket.num_shards, dtype=jnp.int32)[:, None] * self.rows_per_shard

    def _attend(
        self,
        inputs: HeadInputs | LatentInputs,
        pages: Any,
        layer: AttentionMixer,
        metadata: AttentionMetadata,
        page_offset: jax.Array,
    ) -> tuple[jax.Array, Any]:
        if isinstance(inputs, LatentInputs):
            latent = cast(LatentBackend, self.attention)
            pages = latent.write(inputs.rows, pages, metadata, page_offset)
            return latent.attend(inputs.q, inputs.projections, pages, metadata, page_offset, scale=layer.scale), pages
        assert isinstance(layer, SelfAttentionSpec)
        by_head = cast(AttentionBackend, self.attention)
        q, pages = by_head.rope_and_write(inputs.qkv, inputs.rotary, pages, metadata, page_offset)
        out = by_head.ragged_paged_attention(
            q,
            pages,
            metadata,
            page_offset,
            scale=layer.scale,
            sliding_window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=inputs.sinks,
        )
        return out, pages

    def _plan_attention(
        self, batch: ForwardBatch, placement: TokenPlacement, page_table: jax.Array, bucket: Bucket, window: int | None
    ) -> AttentionMetadata:
        """For the layers of one KV group, those of a window; the page table is the group's."""
        page_index, slot_offsets = jnp.divmod(placement.positions, self.page_size)
        pages = page_table[batch.rows]
        slot_pages = jnp.where(placement.is_live, pages[placement.row_index, page_index], NO_PAGE)
        if window in self.decoder.config.chunk_sizes:
            assert window is not None
            rows = chunk_rows(batch, placement, pages, bucket, chunk_size=window, page_size=self.page_size)
        else:
            decode_q_len = bucket.tokens_per_row if bucket.decode_only else None
            rows = AttentionRows(batch.seq_lens, placement.cu_q_lens, pages, decode_q_len)
        step = AttentionMetadata(**rows._asdict(), slot_pages=slot_pages, slot_offsets=slot_offsets)
        return self.attention.plan(step)


def _row_inputs(start: Continuation | HandedOn, rows: jax.Array, bucket: Bucket) -> RowInputs:
    """Of the rows int32 [D, R]."""
    if isinstance(start, Continuation):
        lengths = None if start.lengths is None else start.lengths[rows]
        return RowInputs(start.tokens[rows, : bucket.tokens_per_row], lengths)
    return start.inputs or RowInputs(jnp.zeros((*rows.shape, bucket.tokens_per_row), jnp.int32), None)


def _count_drafts(batch: ForwardBatch, inputs: jax.Array, lengths: jax.Array) -> ForwardBatch:
    """Puts the true lengths of decode rows (`lengths` int32 [R], before this step) in place of the host's bounds."""
    is_decode = jnp.arange(len(lengths)) < batch.header[NUM_DECODE_ROWS]
    num_inputs = 1 + jnp.sum(inputs[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    extend_lens = jnp.where(is_decode, jnp.minimum(num_inputs, batch.extend_lens), batch.extend_lens)
    seq_lens = jnp.where(is_decode, lengths + extend_lens, batch.seq_lens)
    return dataclasses.replace(batch, seq_lens=seq_lens, extend_lens=extend_lens)


def _input_tokens(batch: ForwardBatch, placement: TokenPlacement, inputs: jax.Array) -> jax.Array:
    """int32 [T]: slots of decode rows take their row's `inputs` [R, K] in order, the others bring their token."""
    if batch.input_ids is None:
        return jnp.maximum(inputs.reshape(-1), 0)
    slot = jnp.arange(len(batch.input_ids), dtype=jnp.int32)
    return jnp.where(slot < batch.header[NUM_DECODE_ROWS], inputs[placement.row_index, 0], batch.input_ids)


def _sampled_tokens(hidden: jax.Array, placement: TokenPlacement, bucket: Bucket) -> jax.Array:
    """Of hidden states [T, E] those whose logits are wanted: in a decode step all, [R * K, E], else each row's last, [R, E]."""
    return hidden if bucket.decode_only else hidden[jnp.maximum(placement.cu_q_lens[1:] - 1, 0)]


class OfTokens(NamedTuple):
    """A number of each token: its id, or its adapter's slot."""

    own: jax.Array  # int32 [T]
    of_all: jax.Array  # int32 [A]


def _adapter_slots(batch: ForwardBatch, placement: TokenPlacement) -> jax.Array:
    """int32 [T]"""
    assert batch.adapter_slots is not None
    return jnp.where(placement.is_live, batch.adapter_slots[placement.row_index], NO_SLOT)


def _place(
    batches: ForwardBatch, inputs: jax.Array, bucket: Bucket, shard: jax.Array | int
) -> tuple[TokenPlacement, OfTokens, OfAllShards | None, OfTokens | None]:
    """Of this shard's tokens, and what the model wants to know of those of all: each device has the batches of all shards, so
    that nothing need be sent. The last are adapters' slots, where there are adapters."""
    if bucket.num_shards == 1:
        batch = jax.tree.map(lambda field: field[0], batches)
        placement = place_tokens(batch, bucket)
        ids = _input_tokens(batch, placement, inputs[0])
        slots = _adapter_slots(batch, placement) if bucket.adapts else None
        return placement, OfTokens(ids, ids), None, None if slots is None else OfTokens(slots, slots)
    assert not isinstance(shard, int)
    placements = jax.vmap(lambda batch: place_tokens(batch, bucket))(batches)
    ids = jax.vmap(_input_tokens)(batches, placements, inputs)
    placement = jax.tree.map(lambda field: field[shard], placements)
    exchange: GatherAll | PackAll = GatherAll()
    if bucket.packs_tokens:
        exchange = PackAll.of(jnp.sum(batches.extend_lens, axis=1, dtype=jnp.int32), shard, placement.is_live)
    of_all = OfAllShards(exchange, exchange.pick(placements.positions), exchange.pick(placements.is_live))
    slots = jax.vmap(_adapter_slots)(batches, placements) if bucket.adapts else None
    of_slots = None if slots is None else OfTokens(slots[shard], exchange.pick(slots))
    return placement, OfTokens(ids[shard], exchange.pick(ids)), of_all, of_slots


def write_page_table(page_table: jax.Array, updates: jax.Array) -> jax.Array:
    """Enters int32 [3, U] (row, index, page) into the page table; rows behind its end are padding and dropped."""
    return page_table.at[updates[0], updates[1]].set(updates[2], mode="drop")


def write_own_pages(page_table: jax.Array, updates: jax.Array) -> jax.Array:
    """The same for updates of all shards, whose rows are counted through."""
    rows, index, pages = updates
    return write_page_table(page_table, jnp.stack([own_lines(rows, len(page_table)), index, pages]))
