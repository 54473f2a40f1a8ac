"""What the extend kernel knows before it computes: all that is static, and a block's tile of the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxserve.kernels.pallas.gpu import dequant, softmax
from jaxserve.kernels.pallas.gpu.common import ROW_GROUP, transforms
from jaxserve.kernels.pallas.gpu.extend_plan import (
    BEGIN,
    CHUNK_COLUMNS,
    END,
    KV_LEN,
    LEAD,
    POSITION,
    ROWS,
    SOURCE,
    TOKEN,
    ExtendConfig,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that is static in one kernel."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int | None  # None: keys and values are contiguous
    dtype: Any  # of queries and result
    kv_dtype: Any
    scoring: softmax.Scoring
    sliding_window: int | None
    has_sinks: bool
    has_positions: bool  # of the plan: a row's keys may end before its queries do
    has_log_sums: bool
    is_interpreted: bool
    config: ExtendConfig

    @property
    def is_quantized(self) -> bool:
        return dequant.is_quantized(self.kv_dtype)

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def heads(self) -> int:
        """Query heads of a tile."""
        return self.config.heads_per_tile(self.group)

    @property
    def tokens(self) -> int:
        return self.config.tile_tokens(self.group)

    @property
    def head_groups(self) -> int:
        return self.num_q_heads // self.heads

    @property
    def has_whole_chunks(self) -> bool:
        return self.head_dim_v % CHUNK_COLUMNS == 0

    @property
    def num_chunks(self) -> int:
        """Of the result that leave together."""
        return self.config.num_chunks(self.head_dim, self.head_dim_v, self.is_quantized) if self.has_whole_chunks else 1

    @property
    def consumers(self) -> int:
        return self.config.consumers

    @property
    def wg_heads(self) -> int:
        """Query heads of one consumer's rows: its share of the tile's, or the only one."""
        return max(1, self.heads // self.consumers)

    @property
    def wg_tokens(self) -> int:
        return ROWS // self.wg_heads

    @property
    def block_kv(self) -> int:
        return self.config.block_kv

    @property
    def copy_rows(self) -> int:
        return self.block_kv if self.page_size is None else min(self.page_size, self.block_kv)

    @property
    def copies(self) -> int:
        """TMA copies for the keys of one KV tile, and as many for its values."""
        return self.block_kv // self.copy_rows

    @property
    def q_parts(self) -> list[tuple[int, int]]:
        """(first column, columns): q stands in two buffers where values are narrower, so that one of them fits the result."""
        rest = self.head_dim - self.head_dim_v
        return [(0, self.head_dim)] if rest <= 0 else [(0, self.head_dim_v), (self.head_dim_v, rest)]

    @property
    def k_columns(self) -> int:
        """Columns that the swizzle of key tiles must divide."""
        return math.gcd(*(width for _, width in self.q_parts))

    def swizzle(self, name: str) -> int:
        """Bytes, of key ("k") or value ("v") tiles."""
        return int(transforms(self.k_columns if name == "k" else self.head_dim_v, self.dtype)[1].swizzle)


@dataclasses.dataclass(frozen=True)
class Work:
    """What of a plan one block does: an item in each round, the first blocks first and the last blocks first by turns.

    So a block that had the longest item of a round has the shortest of the next, and all end at about the same time.
    """

    tiles: Any  # as ExtendPlan has them
    num_items: Any
    block: Any
    num_blocks: int

    def for_each(self, visit: Callable[[Any, Any], Any]) -> Any:
        """done = visit(item, done) for each item; `done` counts steps, the last is returned."""
        rounds = lax.div(self.num_items, jnp.int32(self.num_blocks))
        rounds += (self._item(rounds) < self.num_items).astype(jnp.int32)
        return lax.fori_loop(0, rounds, lambda i, done: visit(self._item(i), done), jnp.int32(0))

    def _item(self, turn: Any) -> Any:
        place = jnp.where(turn % 2 == 0, self.block, self.num_blocks - 1 - self.block)
        return turn * self.num_blocks + place


@dataclasses.dataclass(frozen=True)
class Tile:
    """An item of a block's work: a row of the plan and some heads, and what follows from them. Traced scalars.

    Each warpgroup reads for itself, the consumers thrice: registers are scarce in between. The producer, which is ahead of
    them, has brought the plan's row into the SM's cache.
    """

    source: Any
    first_token: Any
    position: Any
    begin: Any
    end: Any
    kv_len: Any
    lead: Any
    visible: Any  # keys that the last query sees
    oldest: Any  # the first key that any query sees
    first_head: Any
    kv_head: Any
    kv_begin: Any  # in KV tiles
    kv_end: Any
    num_full: Any  # KV tiles that all of the tile's queries see whole, but for the last step, which is told apart anyway
    first_full: Any  # with these the tile begins, so that masks are needed in one stretch at the end only
    first_step: Any  # steps count on from item to item
    end_step: Any

    @staticmethod
    def read(s: Shape, work: Work, item: Any, done: Any) -> Tile:
        """Heads innermost: those that share a KV head run beside each other. `done` is the number of the item's first step."""
        tiles = work.tiles
        index, head_group = lax.div(item, jnp.int32(s.head_groups)), lax.rem(item, jnp.int32(s.head_groups))
        position, begin, end, kv_len = (tiles[index, field] for field in (POSITION, BEGIN, END, KV_LEN))
        visible = jnp.maximum(jnp.minimum(position + end, kv_len), 0)  # with jnp.clip's order registers spill for pages of 8
        kv_begin, kv_end = jnp.int32(0), lax.div(visible + (s.block_kv - 1), s.block_kv)
        oldest = tiles[index, LEAD] if s.page_size is None else jnp.int32(0)
        first = oldest  # the first key that all queries see
        if s.sliding_window is not None:
            oldest = jnp.maximum(position + begin - (s.sliding_window - 1), oldest)
            kv_begin = jnp.minimum(lax.div(oldest, s.block_kv), kv_end)
            first = jnp.maximum(first, position + end - s.sliding_window)
        first_full = jnp.clip(lax.div(first + (s.block_kv - 1), s.block_kv), kv_begin, kv_end)
        full_end = jnp.minimum(lax.div(jnp.maximum(position + begin + 1, 0), s.block_kv), kv_end)
        if s.has_positions and s.sliding_window is not None:  # the last KV tile is not always the last step
            full_end = jnp.minimum(full_end, lax.div(kv_len, s.block_kv))
        return Tile(
            source=tiles[index, SOURCE],
            first_token=pl.multiple_of(tiles[index, TOKEN], ROW_GROUP),
            position=position,
            begin=begin,
            end=end,
            kv_len=kv_len,
            lead=tiles[index, LEAD],
            visible=visible,
            oldest=oldest,
            first_head=head_group * s.heads,
            kv_head=lax.div(head_group, s.group // s.heads),
            kv_begin=kv_begin,
            kv_end=kv_end,
            num_full=jnp.maximum(jnp.minimum(full_end - first_full, kv_end - kv_begin - 1), 0),
            first_full=first_full,
            first_step=done,
            end_step=done + (kv_end - kv_begin),
        )

    def for_consumer(self, s: Shape, wg: Any) -> Tile:
        """Tokens and heads of one consumer: of two, half of the heads, or half of the tokens if there is but one head."""
        if s.consumers == 1:
            return self
        heads, tokens = (s.wg_heads, 0) if s.heads > 1 else (0, ROWS)
        own = {name: jnp.clip(getattr(self, name) - wg * tokens, 0, s.wg_tokens) for name in ("begin", "end")}
        first_token = pl.multiple_of(self.first_token + wg * tokens, ROW_GROUP)
        position, first_head = self.position + wg * tokens, self.first_head + wg * heads
        return dataclasses.replace(self, first_token=first_token, position=position, first_head=first_head, **own)

    @property
    def has_steps(self) -> Any:
        return self.end_step > self.first_step

    def kv_tile(self, s: Shape, step: Any) -> Any:
        """The KV tile of a step: from first_full to the end, then the ones before it."""
        kv_tile = step + (self.first_full - self.first_step)
        if s.sliding_window is None and s.page_size is not None:
            return kv_tile
        return jnp.where(kv_tile >= self.kv_end, kv_tile - (self.kv_end - self.kv_begin), kv_tile)
