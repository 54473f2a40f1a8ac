"""ForwardBatch: one step's input on the device, and the packed buffer it travels in.

The host sends a step as ONE int32 buffer (a transfer costs more than its bytes do); floats travel as their bits. `Deal.pack`
writes a StepInput into a fresh NumPy buffer, `unpack` slices it apart again inside the jitted step. Both walk the same
`layout`, so a field is described once. Nothing else reaches the step but the weights and the state.

With attention by data parallelism the buffer holds a batch for each shard, one behind the other; every device gets all of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.executor.row_params import NUM_ROW_PARAMS

# Positions in the header.
NUM_ROWS, NUM_DECODE_ROWS, HEADER_LEN = range(3)

NO_ROW = 1 << 30  # no page table has it: writes to it are dropped


class Places(NamedTuple):
    """Of a step: what one shard has to have room for."""

    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static shape of a compiled step, of each of its shards."""

    num_tokens: int  # T: token slots; of a step of decode rows only, K for each row
    num_rows: int  # R: row slots
    num_page_updates: int  # U: page-table entries one step can write
    decode_only: bool
    num_shards: int = 1
    packs_tokens: bool = False  # all shards together have at most T tokens: they are exchanged by PackAll
    adapts: bool = False  # rows may use LoRA adapters

    @property
    def tokens_per_row(self) -> int:
        """K: most tokens a row can gain in the step; above 1 where drafts are verified."""
        return self.num_tokens // self.num_rows if self.decode_only else 1

    @property
    def total_rows(self) -> int:
        """Of all shards."""
        return self.num_rows * self.num_shards

    @property
    def total_tokens(self) -> int:
        """Most tokens of all shards."""
        return self.num_tokens if self.packs_tokens else self.num_tokens * self.num_shards

    @property
    def name(self) -> str:
        shards = "" if self.num_shards == 1 else f" x{self.num_shards}{' packed' if self.packs_tokens else ''}"
        adapters = " with adapters" if self.adapts else ""
        if not self.decode_only:
            return f"extend T={self.num_tokens} R={self.num_rows}{shards}{adapters}"
        drafts = "" if self.tokens_per_row == 1 else f" K={self.tokens_per_row}"
        return f"{'verify' if drafts else 'decode'} R={self.num_rows}{drafts}{shards}{adapters}"

    @property
    def with_adapters(self) -> Bucket:
        return dataclasses.replace(self, adapts=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """One step's rows and tokens, padded to a bucket of T tokens, R rows and U page updates (all int32)."""

    header: jax.Array  # [HEADER_LEN]
    rows: jax.Array  # [R] request row of the shard; padding rows name the row behind the last request row
    seq_lens: jax.Array  # [R] tokens in the cache after this step; 0 for padding; an upper bound for rows with drafts
    extend_lens: jax.Array  # [R] tokens this step adds; 0 for padding; an upper bound for rows with drafts
    sample: jax.Array  # [R] 1 where the row's next token is wanted
    row_params: jax.Array  # [R, NUM_ROW_PARAMS] sampling parameters, see row_params.py
    page_updates: jax.Array  # [3, U] row of the shard's page tables, index, page; of padding NO_ROW
    input_ids: jax.Array | None  # [T] decode slots are ignored; None if decode_only
    adapter_slots: jax.Array | None = None  # [R] -1 without an adapter, and for padding; None in steps without


def layout(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Field name -> shape, in the order of the packed buffer."""
    R = bucket.num_rows
    fields: dict[str, tuple[int, ...]] = {
        "header": (HEADER_LEN,),
        "rows": (R,),
        "seq_lens": (R,),
        "extend_lens": (R,),
        "sample": (R,),
        "row_params": (R, NUM_ROW_PARAMS),
        "page_updates": (3, bucket.num_page_updates),
    }
    if not bucket.decode_only:
        fields["input_ids"] = (bucket.num_tokens,)
    if bucket.adapts:
        fields["adapter_slots"] = (R,)
    return fields


def packed_len(bucket: Bucket) -> int:
    """Of all shards."""
    return bucket.num_shards * sum(math.prod(shape) for shape in layout(bucket).values())


def split_packed(buffer: Any, bucket: Bucket) -> dict[str, Any]:
    """The fields of a packed buffer, each with all shards in front; of NumPy views of it, or of JAX."""
    fields, start, by_shard = {}, 0, buffer.reshape(bucket.num_shards, -1)
    for name, shape in layout(bucket).items():
        end = start + math.prod(shape)
        fields[name] = by_shard[:, start:end].reshape(-1, *shape)
        start = end
    return fields


def unpack(buffer: jax.Array, bucket: Bucket) -> ForwardBatch:
    """The inverse of `Deal.pack`, traced inside the step; all fields have the shards in front."""
    fields = split_packed(buffer, bucket)
    return ForwardBatch(**{"input_ids": None, **fields})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenPlacement:
    """Where each token slot of a step belongs; derived on the device from the rows."""

    row_index: jax.Array  # int32 [T] index into the batch's rows
    positions: jax.Array  # int32 [T] position in the sequence
    is_live: jax.Array  # bool [T] False for padding
    cu_q_lens: jax.Array  # int32 [R + 1] sums of the rows' tokens


def place_tokens(batch: ForwardBatch, bucket: Bucket) -> TokenPlacement:
    R, T = bucket.num_rows, bucket.num_tokens
    ends = jnp.cumsum(batch.extend_lens, dtype=jnp.int32)
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    token = jnp.arange(T, dtype=jnp.int32)
    if bucket.decode_only:
        row_index, offset_in_row = jnp.divmod(token, bucket.tokens_per_row)
        is_live = offset_in_row < batch.extend_lens[row_index]
    else:
        row_index = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), R - 1).astype(jnp.int32)
        offset_in_row = token - cu_q_lens[row_index]
        is_live = token < ends[-1]
    positions = batch.seq_lens[row_index] - batch.extend_lens[row_index] + offset_in_row
    return TokenPlacement(row_index, jnp.where(is_live, positions, 0), is_live, cu_q_lens)
