"""What the extend kernel is told: its tunables, and the step's queries cut into tiles. It knows no page and no layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.kernels.pallas.gpu.common import MOVES_REGISTERS, ROW_GROUP, SMEM_BYTES, cdiv, resources_problem, round_up

ROWS = 64  # of scores per consumer warpgroup: the M of one wgmma
CHUNK_COLUMNS = 64  # in which a result leaves, also row by row: rows of 128 bytes, TMA's alignment in shared memory

# Columns of ExtendPlan.tiles.
SOURCE, TOKEN, POSITION, BEGIN, END, KV_LEN, LEAD = range(7)


@dataclasses.dataclass(frozen=True)
class ExtendConfig:
    """Tunables; none of them was timed yet, the defaults are FlashAttention-3's."""

    consumers: int = 2  # warpgroups beside the producer: 2, which take turns, or 1, which has 255 registers a thread
    block_kv: int = 128  # tokens of a KV tile, a multiple of 64
    num_stages: int = 2  # K and V tiles in flight; 2 x 128 tokens x (128 + 128) x 2 bytes are 128 of 227 KiB
    max_heads_per_tile: int = 16  # 8 tokens of each head are left then, the least that TMA puts into a swizzled tile
    num_sms: int = 132  # of an H100 SXM or H200: one block per SM, all resident at once
    consumer_registers: int = 232  # of two: 2 x 232 + 40 is what the three warpgroups start with, 168 registers a thread
    producer_registers: int = 40

    @staticmethod
    def for_heads(head_dim: int, head_dim_v: int | None = None, *, is_quantized: bool = False) -> ExtendConfig:
        """Stages must fit into shared memory beside q, and 64 x (block_kv + head_dim_v) floats into a consumer's registers.

        Where warpgroups cannot move registers, each of two consumers has 168: enough for tiles of 64 tokens, values up to 128
        wide and keys up to 192, or up to 128 if they are quantized.
        """
        head_dim_v = head_dim_v or head_dim
        if not MOVES_REGISTERS and max(head_dim_v, head_dim if is_quantized else 0) > 128:
            return ExtendConfig(consumers=1, block_kv=64, num_stages=3 if head_dim <= 192 else 2)
        if is_quantized:  # the producer converts, too; a tile's scales take as many registers again as a quarter of its scores
            if head_dim > 192:
                return ExtendConfig(consumers=1, block_kv=64)
            stages = 4 if head_dim <= 128 else 3
            return ExtendConfig(block_kv=64, num_stages=stages, consumer_registers=216, producer_registers=72)
        if head_dim > 192:
            return ExtendConfig(block_kv=64)
        config = ExtendConfig()
        if MOVES_REGISTERS and config.smem_bytes(head_dim, head_dim_v, is_quantized) <= SMEM_BYTES:
            return config
        shares = {"consumer_registers": 216, "producer_registers": 72}  # half as many scores
        fitting = (ExtendConfig(block_kv=64, num_stages=stages, **shares) for stages in (4, 3))
        return next(c for c in fitting if c.smem_bytes(head_dim, head_dim_v, is_quantized) <= SMEM_BYTES)

    def problem(self, head_dim: int, head_dim_v: int, is_quantized: bool) -> str | None:
        """Why the kernel can not run with this, as a sentence, or None."""
        if self.consumers not in (1, 2):
            return f"consumers must be 1 or 2, not {self.consumers}"
        if self.block_kv not in (64, 128, 256):
            return f"block_kv must be 64, 128 or 256, not {self.block_kv}"
        if is_quantized and self.block_kv > 128:
            return f"block_kv must be 64 or 128 with a quantized KV cache, not {self.block_kv}"
        if self.num_stages < 2:
            return f"num_stages must be at least 2, not {self.num_stages}"
        if self.num_sms < 1:
            return f"num_sms must be at least 1, not {self.num_sms}"
        if self.max_heads_per_tile not in (1, 2, 4, 8, 16):
            return f"max_heads_per_tile must be 1, 2, 4, 8 or 16, not {self.max_heads_per_tile}"
        return resources_problem(self, 1, self.consumers, self.smem_bytes(head_dim, head_dim_v, is_quantized))

    def smem_bytes(self, head_dim: int, head_dim_v: int, is_quantized: bool, num_chunks: int = 1) -> int:
        """Of a block: q, K and V tiles, chunks of the result, what quantized tiles come with, 2.5 KiB for barriers."""
        tile = self.block_kv * (head_dim + head_dim_v)
        raw = tile + self.num_stages * self.block_kv * 2 * 4 if is_quantized else 0
        columns = head_dim + num_chunks * CHUNK_COLUMNS
        return 2 * (self.consumers * ROWS * columns + self.num_stages * tile) + raw + 2560

    def num_chunks(self, head_dim: int, head_dim_v: int, is_quantized: bool) -> int:
        """Chunks of the result for which there is shared memory: all, or at least one."""
        most = cdiv(head_dim_v, CHUNK_COLUMNS)
        fitting = (n for n in range(most, 1, -1) if self.smem_bytes(head_dim, head_dim_v, is_quantized, n) <= SMEM_BYTES)
        return next(fitting, 1)

    def heads_per_tile(self, group: int) -> int:
        """The largest power of two that divides the query heads of a KV head, within the limits."""
        return min(group & -group, self.max_heads_per_tile, self.consumers * ROWS // ROW_GROUP)

    def tile_tokens(self, group: int) -> int:
        return self.consumers * ROWS // self.heads_per_tile(group)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExtendPlan:
    """The tiles of a step, longest context first, idle ones last.

    A tile covers tile_tokens tokens from TOKEN on, all within the (padded) array; TOKEN is a multiple of eight, since TMA puts
    rows into swizzled shared memory by eights. Those in [BEGIN, END), counted from TOKEN, are the tile's own; others are a
    neighbour's: computed, never written. POSITION is the position of TOKEN among the row's keys, and may be negative, or
    past the KV_LEN keys that there are. Keys are counted from SOURCE, which is a row of the page table, or an index into
    contiguous keys; there the row's first key is LEAD behind SOURCE, LEAD < 8, and POSITION and KV_LEN are counted from
    SOURCE, too.
    """

    tiles: jax.Array  # int32 [N, 7]
    ends: jax.Array  # int32 [R + 1] tiles of the rows so far, padding as the last; so the last is the number of tiles not idle
    tile_tokens: int = dataclasses.field(metadata={"static": True})
    places: jax.Array | None = None  # int32 [T] tokens among those of all tiles, N x tile_tokens; None: no log sums wanted
    # They were given: a row's keys may end before its queries do.
    has_positions: bool = dataclasses.field(default=False, metadata={"static": True})


def plan_extend(
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_tokens: int,
    *,
    group: int,
    min_q_len: int = 1,
    first_positions: jax.Array | None = None,
    cu_kv_lens: jax.Array | None = None,
    with_log_sums: bool = False,
    config: ExtendConfig,
) -> ExtendPlan:
    """Cuts rows of at least `min_q_len` queries, and the padding behind them, into tiles. A plan serves every sliding window.

    kv_lens int32 [R], cu_q_lens int32 [R + 1], num_tokens T, group Hq / Hkv. With cu_kv_lens int32 [R + 1] the plan is for
    ragged_extend, whose keys are contiguous; kv_lens are their differences.

    A row's keys may be a chunk of those that its queries attend to. Then first_positions int32 [R] says where its first query
    stands, counted from the first key of the chunk: by default kv_lens - q_lens, in a chunk behind the query's own less than
    0, in one before it kv_lens or more. A query sees no key of a chunk behind its own, and gives zeros.
    """
    tile_tokens = config.tile_tokens(group)
    num_rows = kv_lens.shape[0]
    starts = cu_q_lens.astype(jnp.int32)  # of the rows, then of the padding
    q_lens = jnp.diff(starts, append=num_tokens)
    is_padding = jnp.arange(num_rows + 1) == num_rows
    skew = starts % ROW_GROUP  # tokens of a neighbour at the beginning of the row's first tile
    wanted = jnp.where((q_lens > 0) & (is_padding | (q_lens >= min_q_len)), skew + q_lens, 0)
    ends = jnp.cumsum(-(-wanted // tile_tokens), dtype=jnp.int32)  # one past each row's last tile
    tile = jnp.arange(_most_tiles(num_tokens, num_rows, min_q_len, tile_tokens), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32), num_rows)
    done = (tile - jnp.where(row > 0, ends[row - 1], 0)) * tile_tokens - skew[row]  # queries of the row in earlier tiles
    token = starts[row] + done
    first_token = jnp.clip(token, 0, padded_tokens(num_tokens, tile_tokens) - tile_tokens)
    shift = token - first_token  # the last tiles reach back rather than past the array's end
    begin = shift + jnp.maximum(-done, 0)
    end = jnp.where(tile < ends[-1], shift + jnp.minimum(q_lens[row] - done, tile_tokens), begin)
    kv_lens = jnp.append(kv_lens.astype(jnp.int32), 0)
    has_positions = first_positions is not None
    first_positions = kv_lens - q_lens if first_positions is None else jnp.append(first_positions.astype(jnp.int32), 0)
    kv_lens, position = kv_lens[row], first_positions[row] + done - shift
    source, lead = _sources(jnp.minimum(row, num_rows - 1), cu_kv_lens)
    kv_lens, position = jnp.where(kv_lens > 0, kv_lens + lead, 0), position + lead
    cost = jnp.where(end > begin, jnp.clip(position + end, 0, kv_lens), -1)
    tiles = jnp.stack([source, first_token, position, begin, end, kv_lens, lead], axis=1)[jnp.argsort(-cost)]
    places = _places(tiles, tile_tokens, num_tokens) if with_log_sums else None
    return ExtendPlan(tiles, ends, tile_tokens, places, has_positions)


def _places(tiles: jax.Array, tile_tokens: int, num_tokens: int) -> jax.Array:
    index = jnp.arange(tile_tokens)
    is_own = (index >= tiles[:, BEGIN, None]) & (index < tiles[:, END, None])
    token = jnp.where(is_own, tiles[:, TOKEN, None] + index, num_tokens)
    places = jnp.arange(token.size, dtype=jnp.int32).reshape(token.shape)
    return jnp.zeros(num_tokens, jnp.int32).at[token].set(places, mode="drop")


def _sources(row: jax.Array, cu_kv_lens: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if cu_kv_lens is None:
        return row, jnp.zeros_like(row)
    first = cu_kv_lens.astype(jnp.int32)[row]
    return first - first % ROW_GROUP, first % ROW_GROUP


def _most_tiles(num_tokens: int, num_rows: int, min_q_len: int, tile_tokens: int) -> int:
    """The largest sum over rows of ceil((skew + len) / tile_tokens), with padding as one more row."""
    rows = min(num_rows, num_tokens // max(min_q_len, 1)) + 1
    return max(1, (num_tokens + rows * (ROW_GROUP - 1 + tile_tokens - 1)) // tile_tokens)


def padded_tokens(num_tokens: int, tile_tokens: int) -> int:
    return max(tile_tokens, round_up(num_tokens, ROW_GROUP))
