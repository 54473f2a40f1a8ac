"""The step: one pure function from (weights, state, packed batch) to (state, sampled tokens).

It runs inside one `jax.shard_map` over the mesh, so models and kernels see their shard and name their collectives; what is
not sharded (rows, tokens, logits) is computed alike on every device. The state is donated and comes back updated in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.executor.forward_batch import (
    NEEDS_ADJUSTING,
    NEEDS_LOGPROBS,
    NEEDS_SAMPLING,
    NEEDS_TOP_LOGPROBS,
    NUM_DECODE_ROWS,
    Bucket,
    ForwardBatch,
    TokenPlacement,
    place_tokens,
    unpack,
)
from jaxserve.executor.row_params import split_row_params
from jaxserve.executor.row_tables import RowTables, adjust_logits
from jaxserve.executor.sampler import SampledTokens, logprobs_of, sample
from jaxserve.kernels.api import AttentionBackend, AttentionMetadata
from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.models import Decoder

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """What lives on the device between steps. The last row of every table is the scratch row of padding rows."""

    kv: jax.Array  # [num_layers * num_pages, *page_shape] page p of layer l at l * num_pages + p
    page_table: jax.Array  # int32 [max_rows + 1, max_pages_per_row]
    next_tokens: jax.Array  # int32 [max_rows + 1] the token each row sampled last
    tables: RowTables


@dataclasses.dataclass(frozen=True)
class Step:
    """The static half of the step."""

    decoder: Decoder
    attention: AttentionBackend
    num_pages: int
    page_size: int
    max_top_logprobs: int

    def __call__(self, params: Params, state: StepState, packed: jax.Array, bucket: Bucket) -> tuple[StepState, SampledTokens]:
        batch = unpack(packed, bucket)
        page_table = write_page_table(state.page_table, batch.page_updates)
        placement = place_tokens(batch, bucket)
        metadata = self._plan_attention(batch, placement, page_table, bucket)
        token_ids = _input_tokens(batch, placement, state.next_tokens)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, layer: jax.Array, window: Any) -> tuple[jax.Array, Any]:
            page_offset = layer * self.num_pages
            kv = self.attention.write_kv(kv, k, v, metadata, page_offset)
            out = self.attention.ragged_paged_attention(
                q, kv, metadata, page_offset, scale=self.decoder.attention_scale, sliding_window=window
            )
            return out, kv

        hidden, kv = self.decoder.forward(params, token_ids, placement.positions, state.kv, attend)
        last_token = jnp.maximum(placement.cu_q_lens[1:] - 1, 0)
        with jax.named_scope("logits"):
            logits = self.decoder.logits(params, hidden[last_token])
        sampled, tables = self._sample(logits, batch, state.tables)
        wanted_rows = jnp.where(batch.sample > 0, batch.rows, state.next_tokens.shape[0])
        next_tokens = state.next_tokens.at[wanted_rows].set(jnp.maximum(sampled.next_token_ids, 0), mode="drop")
        return StepState(kv, page_table, next_tokens, tables), sampled

    def _plan_attention(
        self, batch: ForwardBatch, placement: TokenPlacement, page_table: jax.Array, bucket: Bucket
    ) -> AttentionMetadata:
        page_index, slot_offsets = jnp.divmod(placement.positions, self.page_size)
        pages = page_table[batch.rows]
        slot_pages = jnp.where(placement.is_live, pages[placement.row_index, page_index], NO_PAGE)
        return self.attention.plan(
            kv_lens=batch.seq_lens,
            cu_q_lens=placement.cu_q_lens,
            page_table=pages,
            slot_pages=slot_pages,
            slot_offsets=slot_offsets,
            decode_only=bucket.decode_only,
        )

    def _sample(self, logits: jax.Array, batch: ForwardBatch, tables: RowTables) -> tuple[SampledTokens, RowTables]:
        params, header = split_row_params(batch.row_params), batch.header
        needs_adjusting = header[NEEDS_ADJUSTING] > 0
        with jax.named_scope("sample"):
            adjusted = jax.lax.cond(
                needs_adjusting,
                lambda: adjust_logits(logits, tables, batch.rows, batch.seq_lens, params),
                lambda: logits,
            )
            tokens = sample(adjusted, params, batch.seq_lens, header[NEEDS_SAMPLING] > 0)
            sampled = logprobs_of(
                logits, tokens, self.max_top_logprobs, header[NEEDS_LOGPROBS] > 0, header[NEEDS_TOP_LOGPROBS] > 0
            )
        # Outside the cond, so that the table is updated in place: a table passed through a branch would be copied.
        counted = (batch.sample > 0) & needs_adjusting
        counts = tables.output_counts.at[batch.rows, jnp.maximum(tokens, 0)].add(counted.astype(jnp.int16))
        return sampled, dataclasses.replace(tables, output_counts=counts)


def _input_tokens(batch: ForwardBatch, placement: TokenPlacement, next_tokens: jax.Array) -> jax.Array:
    """int32 [T]: decode slots read what their row sampled last, the others bring their token."""
    sampled = next_tokens[batch.rows[placement.row_index]]
    if batch.input_ids is None:
        return sampled
    slot = jnp.arange(len(batch.input_ids), dtype=jnp.int32)
    return jnp.where(slot < batch.header[NUM_DECODE_ROWS], sampled, batch.input_ids)


def write_page_table(page_table: jax.Array, updates: jax.Array) -> jax.Array:
    """Enters int32 [3, U] (row, index, page) into the page table; rows behind its end are padding and dropped."""
    return page_table.at[updates[0], updates[1]].set(updates[2], mode="drop")
