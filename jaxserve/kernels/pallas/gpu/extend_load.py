"""The extend kernel's producer: one warpgroup that brings keys and values into shared memory, tile by tile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.pallas.gpu import dequant, softmax
from jaxserve.kernels.pallas.gpu.common import ROW_GROUP
from jaxserve.kernels.pallas.gpu.extend_plan import ROWS
from jaxserve.kernels.pallas.gpu.extend_tile import Shape, Tile, Work

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
        """Where no key is visible the table may be garbage, and pages freed: the nearest page with one stands in for those."""
        assert self.s.page_size is not None
        if self.s.sliding_window is not None:
            index = jnp.maximum(index, lax.div(tile.oldest, self.s.page_size))
        last = lax.div(jnp.maximum(tile.visible - 1, 0), self.s.page_size)
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


def produce(s: Shape, work: Work, q: Any, source: Pages | Contiguous, scratch: dict[str, Any]) -> None:
    """All items of a block. What is fetched for one may arrive while the consumers are at the one before."""
    visit = _produce_converted if s.is_quantized else _produce_item

    def produce_item(item: Any, done: Any) -> Any:
        tile = Tile.read(s, work, item, done)
        visit(s, tile, q, source, scratch)
        return tile.end_step

    _drain(s, work.for_each(produce_item), scratch)


def _produce_item(s: Shape, tile: Tile, q: Any, source: Pages | Contiguous, scratch: dict[str, Any]) -> None:
    """Fetches queries, then keys and values tile by tile, into stages that the consumers have left."""

    def step(i: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
        kv_tile, following = tile.kv_tile(s, i), source.ahead(tile, tile.kv_tile(s, i + 1))
        slot = _wait_for_stage(s, i, scratch["k_empty"])
        source.copy(tile, kv_tile, ids, False, scratch["k"].at[slot], scratch["k_full"].at[slot])
        _wait_for_stage(s, i, scratch["v_empty"])
        values, full = scratch["v"].at[slot], scratch["v_full"].at[slot]
        is_whole = tile.kv_len - kv_tile * s.block_kv >= s.block_kv
        if s.page_size is None:
            is_whole &= kv_tile * s.block_kv >= tile.lead

        @pl.when(is_whole)
        def _whole() -> None:
            source.copy(tile, kv_tile, ids, True, values, full)

        @pl.when(jnp.logical_not(is_whole))
        def _partial() -> None:
            source.copy(tile, kv_tile, ids, True, values, scratch["tail"])
            plgpu.barrier_wait(scratch["tail"])
            _clear_values(s, tile, kv_tile, values)
            for _ in range(s.copies):
                plgpu.barrier_arrive(full)

        return following

    first = source.ahead(tile, tile.kv_tile(s, tile.first_step))
    pl.when(tile.has_steps)(lambda: _load_queries(s, tile, q, scratch))
    lax.fori_loop(tile.first_step, tile.end_step, step, first)


def _produce_converted(s: Shape, tile: Tile, q: Any, source: Any, scratch: dict[str, Any]) -> None:
    """Fetches quantized keys and values, the next tile while it converts this one; scales go to the consumers."""

    def fetch(i: Any, ids: tuple[Any, ...], name: str) -> None:
        source.copy(tile, tile.kv_tile(s, i), ids, name == "v", scratch[f"raw_{name}"], scratch[f"raw_{name}_full"])

    def step(i: Any, ids: tuple[Any, ...]) -> tuple[Any, ...]:
        kv_tile, following = tile.kv_tile(s, i), source.ahead(tile, tile.kv_tile(s, i + 1))
        for name in ("k", "v"):
            slot = _wait_for_stage(s, i, scratch[f"{name}_empty"])
            target = scratch[name].at[slot]
            if name == "v":  # with which a tile's scales are done, too
                source.copy_scales(tile, kv_tile, ids, scratch["scales"].at[slot], scratch["scales_full"].at[slot])
            plgpu.barrier_wait(scratch[f"raw_{name}_full"])
            dequant.convert_tile(scratch[f"raw_{name}"], target, s.swizzle(name))
            if name == "v":
                is_partial = tile.kv_len - kv_tile * s.block_kv < s.block_kv
                pl.when(is_partial)(functools.partial(_clear_values, s, tile, kv_tile, target))
            plgpu.barrier_arrive(scratch[f"{name}_full"].at[slot])
            pl.when(i + 1 < tile.end_step)(functools.partial(fetch, i + 1, following, name))
        return following

    first = source.ahead(tile, tile.kv_tile(s, tile.first_step))

    @pl.when(tile.has_steps)
    def _begin() -> None:
        for name in ("k", "v"):
            fetch(tile.first_step, first, name)
        _load_queries(s, tile, q, scratch)

    lax.fori_loop(tile.first_step, tile.end_step, step, first)


def _load_queries(s: Shape, tile: Tile, q: Any, scratch: dict[str, Any]) -> None:
    """Each consumer's, as soon as it has multiplied those of the item before for the last time."""
    for wg in range(s.consumers):
        own, full = tile.for_consumer(s, wg), scratch["q_full"].at[wg]
        pl.when(tile.first_step > 0)(functools.partial(plgpu.barrier_wait, scratch["q_empty"].at[wg]))
        for head in range(s.wg_heads):
            tokens = q.at[pl.ds(own.first_token, s.wg_tokens), own.first_head + head]
            for part, (start, width) in enumerate(s.q_parts):
                target = scratch[f"q{part}"].at[wg, pl.ds(head * s.wg_tokens, s.wg_tokens)]
                plgpu.copy_gmem_to_smem(tokens.at[:, pl.ds(start, width)], target, full)


def _wait_for_stage(s: Shape, step: Any, barrier: Any) -> Any:
    """The slot of a step, once the consumers have left it."""
    slot = lax.rem(step, s.config.num_stages)
    pl.when(step >= s.config.num_stages)(lambda: plgpu.barrier_wait(barrier.at[slot]))
    return slot


def _drain(s: Shape, done: Any, scratch: dict[str, Any]) -> None:
    """Waits until the last queries and tiles have been read, too."""
    for wg in range(s.consumers):
        pl.when(done > 0)(functools.partial(plgpu.barrier_wait, scratch["q_empty"].at[wg]))

    def wait(step: Any, _: None) -> None:
        _wait_for_stage(s, step, scratch["k_empty"])
        _wait_for_stage(s, step, scratch["v_empty"])

    lax.fori_loop(done, done + s.config.num_stages, wait, None)


def _clear_values(s: Shape, tile: Tile, kv_tile: Any, values: Any) -> None:
    """Zeroes what lies outside a row's keys: it may be NaN, and a weight of 0 would not hide that.

    Behind a row's last key that is what its page holds, and where a page with dead tokens stands in for one before the window,
    those; the first key of contiguous rows may have another row's before it. All other values are those of keys.
    """
    begin = None if s.sliding_window is None and s.page_size is not None else tile.oldest - kv_tile * s.block_kv
    for start in range(0, s.block_kv, ROWS):
        end = tile.kv_len - kv_tile * s.block_kv - start
        softmax.clear_rows(values.at[pl.ds(start, ROWS)], end, None if begin is None else begin - start)
