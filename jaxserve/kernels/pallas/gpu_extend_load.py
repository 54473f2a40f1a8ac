"""The extend kernel's producer: one warpgroup that brings keys and values into shared memory, tile by tile."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas import gpu_dequant
from jaxserve.kernels.pallas import gpu_softmax as softmax
from jaxserve.kernels.pallas.gpu_common import ROW_GROUP
from jaxserve.kernels.pallas.gpu_extend_plan import ROWS
from jaxserve.kernels.pallas.gpu_extend_tile import Shape, Tile

MIN_QUANTIZED_PAGE = 32  # whose scales fill the 128 bytes to which TMA aligns in shared memory
PAGES_AHEAD = 4  # page ids that the producer holds in registers; of more, smaller pages it reads each when it comes


@dataclasses.dataclass(frozen=True)
class Pages:
    """Keys and values in a pool: a token's row holds its key, then its value."""

    s: Shape
    pool: Any
    table: Any
    page_offset: Any
    scales: Any = None  # float32 [P, Hkv, 2, page_size] if the pool is quantized

    def _page(self, tile: Tile, index: Any) -> Any:
        """Past the last page with a visible key the table may be garbage: that page stands in for the others."""
        assert self.s.page_size is not None
        last = lax.div(jnp.maximum(tile.position + tile.end - 1, 0), self.s.page_size)
        return self.table[tile.source, jnp.minimum(index, last)]

    def ahead(self, tile: Tile, kv_tile: Any) -> tuple[Any, ...]:
        """Page ids of a KV tile, read before it is known where its tokens will go: so their latency is hidden."""
        if self.s.copies > PAGES_AHEAD:
            return ()
        assert self.s.page_size is not None
        first = lax.div(kv_tile * self.s.block_kv, self.s.page_size)
        return tuple(self._page(tile, first + i) for i in range(self.s.copies))

    def copy(self, tile: Tile, kv_tile: Any, ids: tuple[Any, ...], is_value: bool, target: Any, barrier: Any) -> None:
        s = self.s
        assert s.page_size is not None
        columns = pl.ds(s.head_dim, s.head_dim_v) if is_value else pl.ds(0, s.head_dim)
        start = lax.rem(kv_tile * s.block_kv, s.page_size) if s.page_size > s.block_kv else 0
        offset = self.page_offset[0]

        def copy(page: Any, row: Any) -> None:
            source = self.pool.at[page + offset, tile.kv_head, pl.ds(start, s.copy_rows), columns]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(row, s.copy_rows)], barrier)

        for i, page in enumerate(ids):
            copy(page, i * s.copy_rows)
        if not ids:

            def step(i: Any, _: None) -> None:
                copy(self._page(tile, kv_tile * s.copies + i), pl.multiple_of(i * s.copy_rows, s.copy_rows))

            lax.fori_loop(0, s.copies, step, None)

    def copy_scales(self, tile: Tile, kv_tile: Any, ids: tuple[Any, ...], target: Any, barrier: Any) -> None:
        """Scales of a KV tile's keys, then of its values, into target [2, block_kv]."""
        s = self.s
        assert s.page_size is not None
        start = lax.rem(kv_tile * s.block_kv, s.page_size) if s.page_size > s.block_kv else 0
        for i, page in enumerate(ids):
            for kind in range(2):
                source = self.scales.at[page + self.page_offset[0], tile.kv_head, kind, pl.ds(start, s.copy_rows)]
                plgpu.copy_gmem_to_smem(source, target.at[kind, pl.ds(i * s.copy_rows, s.copy_rows)], barrier)


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Keys [S, Hkv, Dk] and values [S, Hkv, Dv], rows one behind the other."""

    s: Shape
    keys: Any
    values: Any

    def ahead(self, tile: Tile, kv_tile: Any) -> tuple[Any, ...]:
        return ()

    def copy(self, tile: Tile, kv_tile: Any, ids: tuple[Any, ...], is_value: bool, target: Any, barrier: Any) -> None:
        start = pl.multiple_of(tile.source + kv_tile * self.s.block_kv, ROW_GROUP)
        array = self.values if is_value else self.keys
        plgpu.copy_gmem_to_smem(array.at[pl.ds(start, self.s.block_kv), tile.kv_head], target, barrier)


def produce(s: Shape, tile: Tile, source: Pages | Contiguous, scratch: dict[str, Any]) -> None:
    """Fetches keys and values tile by tile, into stages that the consumers have left."""

    def step(i: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
        kv_tile, following = tile.kv_tile(s, i), source.ahead(tile, tile.kv_tile(s, i + 1))
        slot = _wait_for_stage(s, i, scratch["k_empty"])
        source.copy(tile, kv_tile, ids, False, scratch["k"].at[slot], scratch["k_full"].at[slot])
        _wait_for_stage(s, i, scratch["v_empty"])
        values, full = scratch["v"].at[slot], scratch["v_full"].at[slot]
        live = tile.kv_len - kv_tile * s.block_kv
        is_whole = live >= s.block_kv
        if s.page_size is None:
            is_whole &= kv_tile * s.block_kv >= tile.lead

        @pl.when(is_whole)
        def _whole() -> None:
            source.copy(tile, kv_tile, ids, True, values, full)

        @pl.when(jnp.logical_not(is_whole))
        def _partial() -> None:
            source.copy(tile, kv_tile, ids, True, values, scratch["tail"])
            plgpu.barrier_wait(scratch["tail"])
            _clear_values(s, values, live)
            if s.page_size is None:
                _clear_front(s, values, tile.lead - kv_tile * s.block_kv)
            for _ in range(s.copies):
                plgpu.barrier_arrive(full)

        return following

    lax.fori_loop(0, tile.num_steps, step, source.ahead(tile, tile.kv_tile(s, 0)))
    _drain(s, tile, scratch)


def produce_converted(s: Shape, tile: Tile, source: Pages, scratch: dict[str, Any]) -> None:
    """Fetches quantized keys and values, the next tile while it converts this one; scales go to the consumers."""

    def fetch(i: Any, ids: tuple[Any, ...], name: str) -> None:
        source.copy(tile, tile.kv_tile(s, i), ids, name == "v", scratch[f"raw_{name}"], scratch[f"raw_{name}_full"])

    def step(i: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
        kv_tile, following = tile.kv_tile(s, i), source.ahead(tile, tile.kv_tile(s, i + 1))
        slot = _wait_for_stage(s, i, scratch["k_empty"])
        _wait_for_stage(s, i, scratch["v_empty"])
        source.copy_scales(tile, kv_tile, ids, scratch["scales"].at[slot], scratch["scales_full"].at[slot])
        for name in ("k", "v"):
            target = scratch[name].at[slot]
            plgpu.barrier_wait(scratch[f"raw_{name}_full"])
            gpu_dequant.convert_tile(scratch[f"raw_{name}"], target, s.swizzle(name))
            live = tile.kv_len - kv_tile * s.block_kv
            if name == "v":
                pl.when(live < s.block_kv)(functools.partial(_clear_values, s, target, live))
            plgpu.barrier_arrive(scratch[f"{name}_full"].at[slot])
            pl.when(i + 1 < tile.num_steps)(functools.partial(fetch, i + 1, following, name))
        return following

    first = source.ahead(tile, tile.kv_tile(s, 0))
    for name in ("k", "v"):
        pl.when(tile.num_steps > 0)(functools.partial(fetch, 0, first, name))
    lax.fori_loop(0, tile.num_steps, step, first)
    _drain(s, tile, scratch)


def _wait_for_stage(s: Shape, step: Any, barrier: Any) -> Any:
    """The slot of a step, once the consumers have left it."""
    slot = lax.rem(step, s.config.num_stages)
    pl.when(step >= s.config.num_stages)(lambda: plgpu.barrier_wait(barrier.at[slot]))
    return slot


def _drain(s: Shape, tile: Tile, scratch: dict[str, Any]) -> None:
    """Waits until the last tiles have been read, too."""

    def wait(step: Any, _: None) -> None:
        _wait_for_stage(s, step, scratch["k_empty"])
        _wait_for_stage(s, step, scratch["v_empty"])

    lax.fori_loop(tile.num_steps, tile.num_steps + s.config.num_stages, wait, None)


def _clear_values(s: Shape, values: Any, live: Any) -> None:
    """Zeroes what lies behind a row's last value: it may be NaN, and a weight of 0 would not hide that."""
    for start in range(0, s.block_kv, ROWS):
        softmax.clear_rows(values.at[pl.ds(start, ROWS)], live - start)


def _clear_front(s: Shape, values: Any, count: Any) -> None:
    """Zeroes the first `count` values, of the previous row of contiguous keys: less than eight, and possibly NaN, too."""
    width = math.gcd(s.head_dim_v, 64)  # at a time, to hold few registers
    for column in range(0, s.head_dim_v, width):
        part = values.at[pl.ds(0, ROWS), pl.ds(column, width)]
        value = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(row >= count, value, jnp.zeros_like(value))
    plgpu.commit_smem()
