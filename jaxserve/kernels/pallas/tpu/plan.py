"""The division of a step's work for the TPU kernels, computed in XLA once per step and shared by all layers.

A pass is one kernel call: the decode pass takes the rows with few queries (in mixed steps: up to TpuConfig.decode_queries), the
extend pass the others. Query tokens are cut into
blocks of fixed size, whatever rows they belong to, so that queries and results flow through plain pipelined blocks. An item is
a block and a row that have tokens in common; its keys and values are read once. Items stand in token order, so those of a
block are neighbours, and the kernel fetches the next items' first pages while it works on the last ones of this.

In a decode pass of n queries per row, row r has the n tokens from r * n on, which are a tile. As an extend row it would fill a
small part of a tile, and one at the border of two blocks would be two items, whose keys are read twice.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.kernels.metadata import NO_PAGE, decode_q_lens, live_tokens
from jaxserve.kernels.pallas.tpu.tuning import PassConfig, TpuConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassPlan:
    """All arrays are int32."""

    block_items: jax.Array  # [num_blocks + 1] the items of block b are block_items[b]:block_items[b + 1]
    item_block: jax.Array  # [max_items]
    item_row: jax.Array  # [max_items]
    q_start: jax.Array  # [R] row r's queries are tokens q_start[r]:q_start[r] + q_len[r] of this pass
    q_len: jax.Array  # [R] 0 for rows that have no part in this pass
    kv_len: jax.Array  # [R]
    position: jax.Array | None  # [R] of row r's first query, 0 for one at the row's first key; None: kv_len - q_len
    config: PassConfig = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.block_items.shape[0] - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WritePlan:
    """Items: groups of neighbouring slots in one page that are written at once. All arrays are int32."""

    num_items: jax.Array  # [] live ones, which come first
    page: jax.Array  # [max_items] without the layer's offset
    first: jax.Array  # [max_items] the item's slots in the page are first:end
    end: jax.Array  # [max_items]
    token: jax.Array  # [max_items] the token in slot `first`
    group_tokens: int = dataclasses.field(metadata={"static": True})  # an item's slots are in one aligned group of so many
    single: bool = dataclasses.field(metadata={"static": True})  # items have one token each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TpuPlan:
    decode: PassPlan | None  # None where all rows are in the extend pass
    extend: PassPlan | None  # None for steps of decode rows only
    write: WritePlan
    page_table: jax.Array  # [R, 1, max_pages] so that a row of it is a whole piece of memory
    decode_tokens: jax.Array | None  # [R * n] the step's token that is token r * n + i of the decode pass; any if there is none
    decode_place: jax.Array | None  # [T] the inverse: a token's place in the decode pass, -1 for those of no decode row

    def with_positions(self, positions: jax.Array) -> TpuPlan:
        """The same with each row's first query at `positions` [R], of which none is negative."""
        decode = None if self.decode is None else dataclasses.replace(self.decode, position=positions)
        extend = None if self.extend is None else dataclasses.replace(self.extend, position=positions)
        return dataclasses.replace(self, decode=decode, extend=extend)


def plan_pass(
    q_start: jax.Array,
    q_len: jax.Array,
    kv_len: jax.Array,
    num_tokens: int,
    config: PassConfig,
    positions: jax.Array | None = None,
) -> PassPlan:
    """Rows with q_len 0 or kv_len 0 get no items. q_start + q_len must not decrease over the rows that do.

    `positions`, where a row's keys are a part of its sequence: where its first query stands, counted from the first of these
    keys. Queries behind the keys (position >= kv_len) see all of them. Queries before the keys (position < 0) see none, and
    have no part in the pass: q_start, q_len and position of the plan are those of the first query that sees a key.
    """
    if positions is not None:
        num_before = jnp.clip(-positions, 0, q_len)
        q_start, q_len, positions = q_start + num_before, q_len - num_before, positions + num_before
    R, B = q_start.shape[0], config.block_tokens
    num_blocks = -(-num_tokens // B)
    q_len = jnp.where(kv_len > 0, q_len, 0)
    first = q_start // B
    counts = jnp.where(q_len > 0, (q_start + q_len - 1) // B - first + 1, 0)
    ends = jnp.cumsum(counts)
    items = jnp.arange(num_blocks + R, dtype=jnp.int32)  # each row's last block may hold the next row's first token
    row = jnp.minimum(_first_above(ends, items), R - 1)
    block = jnp.where(items < ends[-1], first[row] + items - (ends - counts)[row], num_blocks)
    block_items = jnp.sum(block[None, :] < jnp.arange(num_blocks + 1)[:, None], axis=1, dtype=jnp.int32)
    return PassPlan(block_items, block, row, q_start, q_len, kv_len, positions, config)


def _first_above(ends: jax.Array, values: jax.Array) -> jax.Array:
    """Index of the first of `ends` that is greater than each value, len(ends) if none is."""
    return jnp.sum(ends[None, :] <= values[:, None], axis=1, dtype=jnp.int32)


def plan_step(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    page_table: jax.Array,
    slot_pages: jax.Array,
    slot_offsets: jax.Array,
    *,
    decode_q_len: int | None,
    page_size: int,
    config: TpuConfig,
    all_alike: bool = False,
) -> TpuPlan:
    """Arguments as AttentionMetadata has them. `all_alike`: rows of few queries are in the extend pass with the others."""
    T, R = slot_pages.shape[0], kv_lens.shape[0]
    rows, table = jnp.arange(R, dtype=jnp.int32), page_table[:, None]
    if decode_q_len is not None:
        q_lens = decode_q_lens(kv_lens, cu_q_lens, decode_q_len)
        decode = plan_pass(rows * decode_q_len, q_lens, kv_lens, T, config.decode_of(decode_q_len))
        is_live = live_tokens(kv_lens, cu_q_lens, T, decode_q_len)
        if decode_q_len == 1:
            write = plan_decode_write(slot_pages, slot_offsets, is_live, config.min_write_group)
        else:
            write = plan_extend_write(slot_pages, slot_offsets, is_live, R, _write_group(T, R, page_size, config))
        return TpuPlan(decode, None, write, table, None, None)
    q_lens, n = jnp.diff(cu_q_lens), config.decode_queries
    if all_alike:
        is_live = live_tokens(kv_lens, cu_q_lens, T, None)
        write = plan_extend_write(slot_pages, slot_offsets, is_live, R, _write_group(T, R, page_size, config))
        return TpuPlan(None, plan_pass(cu_q_lens[:-1], q_lens, kv_lens, T, config.extend), write, table, None, None)
    is_decode = (q_lens >= 1) & (q_lens <= n)
    decode = plan_pass(rows * n, jnp.where(is_decode, q_lens, 0), kv_lens, R * n, config.decode_of(n))
    extend = plan_pass(cu_q_lens[:-1], jnp.where(is_decode, 0, q_lens), kv_lens, T, config.extend)
    tokens = jnp.arange(T, dtype=jnp.int32)
    is_live = tokens < cu_q_lens[-1]
    row = jnp.minimum(_first_above(cu_q_lens[1:], tokens), R - 1)
    decode_place = jnp.where(is_live & is_decode[row], row * n + tokens - cu_q_lens[row], -1)
    decode_tokens = jnp.minimum(cu_q_lens[:-1, None] + jnp.arange(n, dtype=jnp.int32), T - 1).reshape(-1)
    write = plan_extend_write(slot_pages, slot_offsets, is_live, R, _write_group(T, R, page_size, config))
    return TpuPlan(decode, extend, write, table, decode_tokens, decode_place)


def _write_group(num_tokens: int, num_rows: int, page_size: int, config: TpuConfig) -> int:
    """About a row's share of the tokens: fewer items where prompts are long, no whole pages for a few tokens."""
    group = config.min_write_group
    while 2 * group <= min(page_size, num_tokens // num_rows, config.max_write_group):
        group *= 2
    return group


def plan_decode_write(slot_pages: jax.Array, slot_offsets: jax.Array, is_live: jax.Array, group_tokens: int) -> WritePlan:
    """One item per live token. Two of them are never in one page."""
    T = slot_pages.shape[0]
    is_live = is_live & (slot_pages < NO_PAGE)
    order = jnp.argsort(~is_live, stable=True).astype(jnp.int32)  # live ones first
    num_items = jnp.sum(is_live, dtype=jnp.int32)
    is_item = jnp.arange(T) < num_items
    first = jnp.where(is_item, slot_offsets[order], 0)
    page = jnp.where(is_item, slot_pages[order], 0)
    end = jnp.where(is_item, first + 1, 0)
    return WritePlan(num_items, page, first, end, order, group_tokens, single=True)


def plan_extend_write(
    slot_pages: jax.Array, slot_offsets: jax.Array, is_live: jax.Array, num_rows: int, group_tokens: int
) -> WritePlan:
    """One item per run of tokens in one group of group_tokens slots, which divides the page size."""
    T = slot_pages.shape[0]
    is_live = is_live & (slot_pages < NO_PAGE)
    group = jnp.where(is_live, slot_offsets // group_tokens, -1)
    page = jnp.where(is_live, slot_pages, -1)
    is_new = (page != jnp.roll(page, 1)) | (group != jnp.roll(group, 1))
    starts = is_live & is_new.at[0].set(True)
    # A row's run of n slots touches at most n / group_tokens + 2 groups.
    max_items = min(T, T // group_tokens + 2 * num_rows)
    item = jnp.where(is_live, jnp.cumsum(starts, dtype=jnp.int32) - 1, max_items)
    num_items = jnp.sum(starts, dtype=jnp.int32)
    empty = jnp.zeros(max_items, jnp.int32)
    start_of = jnp.where(starts, item, max_items)
    token = empty.at[start_of].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
    length = empty.at[item].add(1, mode="drop")
    is_item = jnp.arange(max_items) < num_items
    first = jnp.where(is_item, slot_offsets[token], 0)
    item_page = jnp.where(is_item, slot_pages[token], 0)
    return WritePlan(num_items, item_page, first, first + length, token, group_tokens, single=False)
