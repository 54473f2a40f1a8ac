"""The step, in two halves: pure functions of (weights, state, packed batch), then of (logits, sampling state).

The forward half runs the model inside one `jax.shard_map` over the mesh, so models and kernels see their shard and name their
collectives; what is not sharded (rows, tokens, logits) is computed alike on every device. The sampling half turns its logits
into tokens. They are programs of their own because they vary with different things: the forward pass with tokens and rows,
sampling with rows and what the requests ask for. Each half's state is donated to it and comes back updated in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.executor.forward_batch import NUM_DECODE_ROWS, Bucket, ForwardBatch, TokenPlacement, place_tokens, unpack
from jaxserve.executor.row_params import split_row_params
from jaxserve.executor.row_tables import RowTables, adjust_logits
from jaxserve.executor.sampler import SampledTokens, SamplingMode, logprobs_of, sample
from jaxserve.kernels.api import AttentionBackend, AttentionMetadata
from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.kernels.rotary import Rotary
from jaxserve.models import Decoder, SelfAttentionSpec

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardState:
    """What the forward half keeps on the device. The last row of the page table is the scratch row of padding rows."""

    kv: Any  # the backend's arrays [num_layers * num_pages, *page shape]: page p of layer l at l * num_pages + p
    page_table: jax.Array  # int32 [max_rows + 1, max_pages_per_row]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What the sampling half keeps on the device, a line per request row and one for padding rows."""

    next_tokens: jax.Array  # int32 [max_rows + 1] the token each row sampled last
    tables: RowTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forwarded:
    """What the forward half hands on: a line per row of the step."""

    logits: jax.Array  # float32 [R, V], of each row's last token
    rows: jax.Array  # int32 [R] request rows
    seq_lens: jax.Array  # int32 [R]
    sample: jax.Array  # int32 [R] 1 where the next token is wanted
    row_params: jax.Array  # int32 [R, NUM_ROW_PARAMS]


@dataclasses.dataclass(frozen=True)
class Step:
    """The static half of the step."""

    decoder: Decoder
    attention: AttentionBackend
    num_pages: int
    page_size: int

    def __call__(
        self, params: Params, state: ForwardState, next_tokens: jax.Array, packed: jax.Array, bucket: Bucket
    ) -> tuple[ForwardState, Forwarded]:
        batch = unpack(packed, bucket)
        page_table = write_page_table(state.page_table, batch.page_updates)
        placement = place_tokens(batch, bucket)
        metadata = self._plan_attention(batch, placement, page_table, bucket)
        token_ids = _input_tokens(batch, placement, next_tokens)

        def attend(
            qkv: jax.Array, rotary: Rotary, kv: Any, layer: SelfAttentionSpec, index: jax.Array, sinks: jax.Array | None
        ) -> tuple[jax.Array, Any]:
            page_offset = index * self.num_pages
            q, kv = self.attention.rope_and_write(qkv, rotary, kv, metadata, page_offset)
            out = self.attention.ragged_paged_attention(
                q,
                kv,
                metadata,
                page_offset,
                scale=layer.scale,
                sliding_window=layer.window,
                soft_cap=layer.soft_cap,
                sinks=sinks,
            )
            return out, kv

        x = self.decoder.embed(params, token_ids)
        context = self.decoder.context(placement.positions)
        hidden, kv = self.decoder.forward(params, x, context, state.kv, attend)
        last_token = jnp.maximum(placement.cu_q_lens[1:] - 1, 0)
        with jax.named_scope("logits"):
            logits = self.decoder.logits(params, hidden[last_token])
        forwarded = Forwarded(logits, batch.rows, batch.seq_lens, batch.sample, batch.row_params)
        return ForwardState(kv, page_table), forwarded

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


def sample_rows(
    state: SamplingState, forwarded: Forwarded, mode: SamplingMode, max_top_logprobs: int
) -> tuple[SamplingState, SampledTokens]:
    """The sampling half."""
    logits, rows, seq_lens = forwarded.logits, forwarded.rows, forwarded.seq_lens
    params, tables = split_row_params(forwarded.row_params), state.tables
    is_wanted = forwarded.sample > 0
    with jax.named_scope("sample"):
        if mode is SamplingMode.EVERYTHING:
            tokens = sample(adjust_logits(logits, tables, rows, seq_lens, params), params, seq_lens, mode)
            sampled = logprobs_of(logits, tokens, max_top_logprobs)
            counts = tables.output_counts.at[rows, jnp.maximum(tokens, 0)].add(is_wanted.astype(jnp.int16))
            tables = dataclasses.replace(tables, output_counts=counts)
        else:
            sampled = SampledTokens(sample(logits, params, seq_lens, mode))
    wanted_rows = jnp.where(is_wanted, rows, state.next_tokens.shape[0])
    next_tokens = state.next_tokens.at[wanted_rows].set(jnp.maximum(sampled.next_token_ids, 0), mode="drop")
    return SamplingState(next_tokens, tables), sampled


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
