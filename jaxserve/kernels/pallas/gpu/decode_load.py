"""The loading half of the decode kernel: a stream's tiles in shared memory, and the warpgroup that fills them.

Tiles are numbered along the stream, across segments, so that loads run ahead into the next segment. A tile in the queries'
dtype is loaded where wgmma reads it. A quantized one is loaded into `raw` and converted by the same warpgroup just before
the slot is loaded anew: the converter needs no thought of its own about what comes next, and no further warpgroup.

The kernel is compiled without automatic barriers. Each thread waits at a barrier for itself and arrives there for itself, for
copies too (128 arrivals are one of a warpgroup), and one thread starts all copies of its warpgroup. So, place by place:

    place   written by             read by                 what has happened before it is written again
    tiles   copy                   wgmma, clear_rows       the copying thread waited at `free`: all consumers' wgmma is done
    tiles   _convert, all threads  wgmma, clear_rows       each writer waited at `free`. Each fences before it arrives at `full`
    raw     copy                   _convert, all threads   all met in commit_smem, their values loaded, before one copies
    scales  copy                   consumers, all threads  `free` of the values of the tile before in the slot: see _convert

What consumers write there (clear_rows, clear_scales) they fence, by commit_smem, before they arrive at `free`. No barrier is a
turn ahead for some threads: to arrive for the next turn each must have passed a wait that needs all arrivals of this one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import dequant
from jaxserve.kernels.pallas.gpu.common import transforms, value_transforms
from jaxserve.kernels.pallas.gpu.decode_plan import Segment, Shape


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values of a block's streams."""

    tiles: Any  # [slots, block_kv, D] in the queries' dtype
    full: Any  # barrier per slot: may be read
    free: Any  # barrier per slot: has been read
    raw: Any = None  # [raw slots, block_kv, D] as stored, if quantized
    raw_full: Any = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """A stream's tiles. `lane` is the stream within its block."""

    shape: Shape
    lane: Any
    k: Side
    v: Side
    scales: Any = None  # float32 [scale slots, 2, block_kv] if quantized
    scales_full: Any = None

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None

    @property
    def stages(self) -> int:
        """Tiles that may be read by wgmma: one if they are converted, since that is quick."""
        return 1 if self.is_quantized else self.shape.config.stages

    def slot(self, index: Any) -> Any:
        return self._at(index, self.stages)

    def raw_slot(self, index: Any) -> Any:
        return self._at(index, self.shape.config.stages)

    def scale_slot(self, index: Any) -> Any:
        """As many as tiles between being loaded and being read."""
        return self._at(index, self.shape.config.stages + 1)

    def _at(self, index: Any, count: int) -> Any:
        return self.lane * count + lax.rem(index, jnp.int32(count))


def scratch(shape: Shape, dtype: Any, kv_dtype: Any) -> tuple[Any, Any, Any]:
    """Shared memory and barriers of a block: two `Side`s, and (scales, barriers) or (). Pytrees of scratch types."""
    config, is_quantized = shape.config, dequant.is_quantized(kv_dtype)
    raw_slots = config.streams * config.stages
    slots = config.streams if is_quantized else raw_slots
    loaded = plgpu.Barrier(num_arrivals=shape.pages_per_tile, num_barriers=raw_slots)

    def side(columns: int, layout: Any) -> tuple[Any, ...]:
        tiles = plgpu.SMEM((slots, config.block_kv, columns), dtype, transforms=layout)
        handed = plgpu.Barrier(num_barriers=slots)
        if not is_quantized:
            return (tiles, loaded, handed)
        # V begins at column Dk of the pool, and a TMA source must begin at a multiple of the swizzle's width.
        raw_layout = dequant.raw_transforms(math.gcd(shape.head_dim, shape.head_dim_v), kv_dtype)
        return (
            tiles,
            handed,
            handed,
            plgpu.SMEM((raw_slots, config.block_kv, columns), kv_dtype, transforms=raw_layout),
            loaded,
        )

    scales: tuple[Any, ...] = ()
    if is_quantized:
        count = config.streams * (config.stages + 1)
        barrier = plgpu.Barrier(num_arrivals=2 * shape.pages_per_tile, num_barriers=count)
        scales = (plgpu.SMEM((count, 2, config.block_kv), jnp.float32), barrier)
    k, v = _layouts(shape, dtype)
    return side(shape.head_dim, k), side(shape.head_dim_v, v), scales


def _layouts(shape: Shape, dtype: Any) -> tuple[Any, Any]:
    """Transforms of key tiles and of value tiles."""
    return transforms(shape.head_dim, dtype), value_transforms(shape.config.block_kv, shape.head_dim_v, dtype)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where tiles come from, in global memory."""

    pool: Any  # [P, Hkv, page_size, Dk + Dv]
    scales: Any | None  # float32 [P, Hkv, 2, page_size]
    page_table: Any
    page_offset: Any  # scalar


def load_segment(ring: Ring, source: Source, segment: Segment, done: Any) -> None:
    """Loads a segment's tiles. Page ids are read one tile ahead, so that their latency hides behind the wait for a slot."""
    shape, block_kv = ring.shape, ring.shape.config.block_kv
    last_page = lax.div(segment.kv_len - 1, jnp.int32(shape.page_size))
    first_page = lax.div(shape.first_seen(segment), jnp.int32(shape.page_size))

    def page_ids(tile: Any) -> tuple[Any, ...]:
        first = lax.div(tile * block_kv, jnp.int32(shape.page_size))
        # Past the row's last page, and before the first that a query sees, the table is garbage: that page instead, whose
        # tokens are then masked by position.
        at = [jnp.minimum(first + i, last_page) for i in range(shape.pages_per_tile)]
        if shape.sliding_window is not None:
            at = [jnp.maximum(i, first_page) for i in at]
        return tuple(source.page_table[segment.row, i] for i in at)

    def load(tile: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
        index = done + (tile - segment.begin)
        next_ids = page_ids(tile + 1)
        offset = lax.rem(tile * block_kv, jnp.int32(shape.page_size)) if shape.page_size > block_kv else 0
        pages = [(page + source.page_offset, segment.head, offset) for page in ids]
        if ring.is_quantized:
            pl.when(index >= shape.config.stages)(lambda: _convert(ring, index - shape.config.stages))
            _copy_scales(ring, source, pages, index)
        for side, first, count in ((ring.k, 0, shape.head_dim), (ring.v, shape.head_dim, shape.head_dim_v)):
            if not ring.is_quantized:
                _wait_free(ring, side, index)
            _copy(ring, side, source, pages, pl.ds(first, count), index)
        return next_ids

    lax.fori_loop(segment.begin, segment.end, load, page_ids(segment.begin))


def _wait_free(ring: Ring, side: Side, index: Any) -> None:
    """Until tile `index` may be written, which is when the one before it in its slot has been read."""
    pl.when(index >= ring.stages)(lambda: plgpu.barrier_wait(side.free.at[ring.slot(index)]))


def _copy(ring: Ring, side: Side, source: Source, pages: list[Any], columns: Any, index: Any) -> None:
    rows, slot = ring.shape.config.block_kv // len(pages), ring.raw_slot(index)
    tiles, full = (side.raw, side.raw_full) if ring.is_quantized else (side.tiles, side.full)
    for i, (page, head, offset) in enumerate(pages):
        target = tiles.at[slot, pl.ds(i * rows, rows)]
        plgpu.copy_gmem_to_smem(source.pool.at[page, head, pl.ds(offset, rows), columns], target, full.at[slot])


def _copy_scales(ring: Ring, source: Source, pages: list[Any], index: Any) -> None:
    assert source.scales is not None
    rows, slot = ring.shape.config.block_kv // len(pages), ring.scale_slot(index)
    for i, (page, head, offset) in enumerate(pages):
        for kind in range(2):
            target = ring.scales.at[slot, kind, pl.ds(i * rows, rows)]
            origin = source.scales.at[page, head, kind, pl.ds(offset, rows)]
            plgpu.copy_gmem_to_smem(origin, target, ring.scales_full.at[slot])


def _convert(ring: Ring, index: Any) -> None:
    """Tile `index` from `raw` to where wgmma reads it, once the one before it has been read; frees its raw slot."""
    raw_slot, slot = ring.raw_slot(index), ring.slot(index)
    for side, layout in zip((ring.k, ring.v), _layouts(ring.shape, ring.k.tiles.dtype), strict=True):
        plgpu.barrier_wait(side.raw_full.at[raw_slot])
        _wait_free(ring, side, index)
        dequant.convert_tile(side.raw.at[raw_slot], side.tiles.at[slot], layout[1].swizzle)
        plgpu.barrier_arrive(side.full.at[slot])


def finish(ring: Ring, count: Any) -> None:
    """After the last of the stream's `count` tiles is on its way: converts what is left, and waits until all have been read."""

    def convert(index: Any, _: None) -> None:
        _convert(ring, index)

    def wait(index: Any, _: None) -> None:
        for side in (ring.k, ring.v):
            plgpu.barrier_wait(side.free.at[ring.slot(index)])

    if ring.is_quantized:
        lax.fori_loop(jnp.maximum(count - ring.shape.config.stages, 0), count, convert, None)
    lax.fori_loop(jnp.maximum(count - ring.stages, 0), count, wait, None)
