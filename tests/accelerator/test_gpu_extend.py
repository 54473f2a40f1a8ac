"""Ragged paged attention of prompts on Hopper: interpreted against a float64 oracle, and compiled for H200."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.pallas.gpu.extend import (
    ExtendConfig,
    extend_with_log_sums,
    paged_extend,
    plan_extend,
    ragged_extend,
    unsupported,
)
from jaxserve.kernels.pallas.gpu.extend_tile import Work
from jaxserve.kernels.pallas.gpu.softmax import LOWEST
from tests.accelerator.conftest import relative_error, some_always

# NaN is what the interpreter's uninitialised memory holds, and what poisons these cases.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")
SMALL = ExtendConfig(block_kv=64, num_sms=2)
ALONE = ExtendConfig(consumers=1, block_kv=64, num_sms=3)
GARBAGE = np.array([2**31 - 1, -1, -(2**31), 1 << 30], np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step. Pages and tokens that no query of their row may see are NaN, and such pages are nonsense in the table."""

    rows: tuple[tuple[int, int], ...]  # (query_len, kv_len)
    num_tokens: int
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    page_size: int = 64
    dtype: Any = jnp.bfloat16
    min_q_len: int = 1
    first_positions: tuple[int, ...] | None = None  # of the rows; None: kv_len - query_len
    with_log_sums: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    page_offset: int = 3
    kv_dtype: Any = None  # of a quantized pool
    scale: float = 0.125
    config: ExtendConfig = SMALL


@dataclasses.dataclass(frozen=True)
class Drawn:
    q: np.ndarray  # [T, Hq, Dk]
    pool: np.ndarray  # [P, Hkv, page_size, Dk + Dv]
    table: np.ndarray  # [R, max_pages]
    kv: list[np.ndarray]  # per row [Hkv, kv_len, Dk + Dv]
    sinks: np.ndarray  # [Hq]
    scales: np.ndarray | None = None  # float32 [P, Hkv, 2, page_size]


def draw(case: Case, seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(case.dtype)).astype(np.float32)

    width, size = case.head_dim + case.head_dim_v, case.page_size
    kv = [normal(case.kv_heads, kv_len, width) for _, kv_len in case.rows]
    counts = [-(-kv_len // size) for _, kv_len in case.rows]
    num_pages = sum(counts) + 2
    free = rng.permutation(num_pages)
    pool = np.full((case.page_offset + num_pages, case.kv_heads, size, width), np.nan, np.float32)
    table = rng.choice(GARBAGE, (len(case.rows), max(counts, default=0) + 2))
    for row, count in enumerate(counts):
        own, free = free[:count], free[count:]
        for i in range(first_page(case, row), count):
            table[row, i] = page = own[i]
            part = kv[row][:, i * size : (i + 1) * size]
            pool[case.page_offset + page, :, : part.shape[1]] = part
    q = normal(case.num_tokens, case.q_heads, case.head_dim)
    q[sum(query_len for query_len, _ in case.rows) :] = np.nan
    return Drawn(q, pool, table, kv, normal(case.q_heads))


def first_page(case: Case, row: int) -> int:
    """Of those that a query of the row may see; the ones before it have left the window."""
    if case.sliding_window is None:
        return 0
    return max(first_position(case, row) - case.sliding_window + 1, 0) // case.page_size


def first_position(case: Case, row: int) -> int:
    query_len, kv_len = case.rows[row]
    return kv_len - query_len if case.first_positions is None else case.first_positions[row]


def quantized(case: Case, drawn: Drawn) -> Drawn:
    """`drawn` with a pool of small values and scales, and keys and values rounded to what they stand for."""
    rng, dtype = np.random.default_rng(1), jnp.dtype(case.kv_dtype)
    halves = np.split(drawn.pool, [case.head_dim], axis=3)
    scales = rng.uniform(0.5, 2.0, (*drawn.pool.shape[:2], 2, case.page_size)).astype(np.float32)
    steps = 127 if dtype == jnp.int8 else 16
    stored = [np.clip(np.round(half * steps / 4), -steps, steps) for half in halves]
    scales[np.isnan(halves[0][..., 0])[:, :, None].repeat(2, axis=2)] = np.nan
    pool = np.concatenate(stored, axis=3)
    values = np.concatenate([part * scales[:, :, i, :, None] for i, part in enumerate(stored)], axis=3)
    kv = []
    for row, (_, kv_len) in enumerate(case.rows):
        first, tokens = first_page(case, row), drawn.kv[row].copy()
        pages = drawn.table[row, first : -(-kv_len // case.page_size)] + case.page_offset
        if len(pages):
            start = first * case.page_size
            tokens[:, start:] = np.concatenate([values[page] for page in pages], axis=1)[:, : kv_len - start]
        kv.append(tokens)
    garbage = 100 if dtype == jnp.int8 else np.nan
    return dataclasses.replace(drawn, pool=np.where(np.isnan(pool), garbage, pool), kv=kv, scales=scales)


def oracle(case: Case, drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Attention by definition in float64, and its log sums; padding as if it saw no key, NaN for rows below min_q_len."""
    out, log_sums = np.zeros((case.num_tokens, case.q_heads, case.head_dim_v)), np.full((case.num_tokens, case.q_heads), LOWEST)
    group, start = case.q_heads // case.kv_heads, 0
    for row, ((query_len, kv_len), kv) in enumerate(zip(case.rows, drawn.kv, strict=True)):
        tokens = slice(start, start + query_len)
        start += query_len
        if query_len < case.min_q_len:
            out[tokens] = log_sums[tokens] = np.nan
            continue
        keys, values = np.split(np.repeat(kv.astype(np.float64), group, axis=0), [case.head_dim], axis=2)
        scores = np.einsum("thd,hkd->htk", drawn.q[tokens].astype(np.float64), keys) * case.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        ahead = np.arange(kv_len)[None] - (first_position(case, row) + np.arange(query_len))[:, None]
        seen = (ahead <= 0) & (ahead > -(case.sliding_window or 1 << 30))
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(2) + (np.exp(drawn.sinks.astype(np.float64))[:, None] if case.has_sinks else 0)
        out[tokens] = np.einsum("htk,hkd->thd", weights / np.where(total > 0, total, 1)[:, :, None], values)
        log_sums[tokens] = np.log(total, out=np.full_like(total, LOWEST), where=total > 0).T
    return out, log_sums


def lengths(case: Case) -> tuple[jax.Array, jax.Array]:
    """kv_lens and cu_q_lens."""
    query_lens = np.cumsum([0, *(query_len for query_len, _ in case.rows)])
    return jnp.array([kv_len for _, kv_len in case.rows], jnp.int32), jnp.array(query_lens, jnp.int32)


def run(case: Case, drawn: Drawn, interpret: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """The result, and log sums if the case has them."""
    kv_lens, cu_q_lens = lengths(case)
    scales = None if drawn.scales is None else jnp.asarray(drawn.scales)
    first_positions = None if case.first_positions is None else jnp.array(case.first_positions, jnp.int32)

    @jax.jit
    def attend(q: jax.Array, pool: jax.Array, sinks: jax.Array) -> Any:
        plan = plan_extend(
            kv_lens, cu_q_lens, case.num_tokens, group=case.q_heads // case.kv_heads, min_q_len=case.min_q_len,
            first_positions=first_positions, with_log_sums=case.with_log_sums, config=case.config,
        )  # fmt: skip
        options: Any = {
            "head_dim_v": case.head_dim_v, "scale": case.scale, "sliding_window": case.sliding_window,
            "soft_cap": case.soft_cap, "config": case.config, "interpret": interpret,
        }  # fmt: skip
        table, page_offset = jnp.asarray(drawn.table), jnp.int32(case.page_offset)
        if case.with_log_sums:
            return extend_with_log_sums(q, pool, table, plan, page_offset, **options)
        return paged_extend(q, pool, scales, table, plan, page_offset, sinks=sinks if case.has_sinks else None, **options)

    pool = jnp.asarray(drawn.pool, case.kv_dtype or case.dtype)
    result = attend(jnp.asarray(drawn.q, case.dtype), pool, jnp.asarray(drawn.sinks))
    out, log_sums = result if case.with_log_sums else (result, None)
    return np.asarray(out.astype(jnp.float32)), None if log_sums is None else np.asarray(log_sums)


def check(case: Case, interpret: Any) -> None:
    drawn = draw(case) if case.kv_dtype is None else quantized(case, draw(case))
    (got, log_sums), (expected, expected_log_sums) = run(case, drawn, interpret), oracle(case, drawn)
    wanted = ~np.isnan(expected)
    limit = 1e-3 if case.dtype == jnp.float16 else 6e-3
    assert not expected[wanted].any() or relative_error(got[wanted], expected[wanted]) < limit
    live = sum(query_len for query_len, _ in case.rows)
    assert not got[live:].any(), "padding tokens must give zeros"
    if log_sums is not None:
        wanted = ~np.isnan(expected_log_sums)
        assert not got[expected_log_sums == LOWEST].any(), "queries that see no key must give zeros"
        np.testing.assert_allclose(log_sums[wanted], expected_log_sums[wanted], rtol=1e-6, atol=1e-3)


MIXED = ((7, 7), (1, 66), (33, 96), (8, 200))  # chunks with prefixes of none, a page and more, in pages of 64
FREED = ((20, 300), (2, 57), (3, 45), (5, 125), (7, 7))  # a window's first page in mid-tile, also as the row's last
FEW = ((9, 70), (3, 3))
# Chunks of keys: at the row's own end, behind all queries, before the first five, none at all, before all, behind a part.
CHUNKS = ((9, 70), (20, 100), (13, 40), (6, 0), (3, 70), (140, 70))
CHUNK_POSITIONS = (61, 300, -5, -128, -10, 20)

CASES = {
    "mixed rows and padding": Case(MIXED, 56),
    "nothing but padding": Case(((0, 0), (0, 0)), 16),
    "fewer tokens than a tile, two KV heads": Case(((1, 1), (2, 65)), 3, q_heads=4, kv_heads=2, soft_cap=2.0),
    "rows at 8 tokens and behind them": Case(((8, 64), (8, 65), (9, 9), (7, 63), (38, 99)), 72, q_heads=4),
    "sixteen query heads per KV head": Case(FEW, 16, q_heads=16),
    "sixteen query heads, one consumer, pages of 16": Case(FEW, 16, q_heads=16, page_size=16, has_sinks=True, config=ALONE),
    "three query heads per KV head, pages of 8": Case(FEW, 16, q_heads=3, page_size=8),
    "heads per tile limited": Case(FEW, 16, 4, 1, 80, 80, config=dataclasses.replace(SMALL, max_heads_per_tile=2)),
    "decode rows are left out": Case(((1, 70), (20, 96), (1, 1), (2, 2)), 24, min_q_len=2),
    "tiles of two pages, three stages": Case(((20, 500),), 24, config=ExtendConfig(block_kv=128, num_stages=3, num_sms=1)),
    "window of one": Case(FEW, 16, head_dim=96, head_dim_v=96, sliding_window=1),
    "window wider than a tile, pages of 256": Case(((20, 300), (5, 256)), 32, page_size=256, sliding_window=130),
    "freed pages before the window": Case(FREED, 48, page_size=16, sliding_window=20),
    "freed pages of 8 before the window, tiles of 16 pages": Case(
        FREED, 48, 4, page_size=8, sliding_window=3, config=ExtendConfig(block_kv=128, num_sms=1)
    ),
    "float8, freed pages before the window": Case(
        FREED, 48, page_size=32, kv_dtype=jnp.float8_e4m3fn, sliding_window=4, scale=0.01
    ),
    "sinks, one query head per KV head, several tiles": Case(((130, 140),), 136, q_heads=1, has_sinks=True),
    "float16": Case(((5, 66), (9, 70)), 16, head_dim=128, head_dim_v=128, dtype=jnp.float16),
    "float8, one consumer, more tiles than stages": Case(
        ((3, 70), (9, 200)), 16, 2, 1, 256, 256, page_size=32, kv_dtype=jnp.float8_e4m3fn, scale=0.01, config=ALONE
    ),
    "int8, sinks, soft cap and window": Case(
        ((3, 70), (20, 90)), 24, 4, kv_dtype=jnp.int8, has_sinks=True, soft_cap=3.0, sliding_window=30, scale=0.002
    ),
    "head_dim 192, values 128": Case(FEW, 16, head_dim=192, head_dim_v=128),
    "head_dim 256": Case(FEW, 16, head_dim=256, head_dim_v=256),
    "chunks of keys": Case(CHUNKS, 200, 2, 2, 192, 128, first_positions=CHUNK_POSITIONS, with_log_sums=True),
    "chunks of keys, window, pages of 16": Case(
        CHUNKS, 200, 4, page_size=16, first_positions=CHUNK_POSITIONS, with_log_sums=True, sliding_window=90, config=ALONE
    ),
    "keys that end before their queries, in a window": Case(
        ((330, 330), (70, 70), (3, 130)), 408, 4, page_size=16, first_positions=(150, 150, 200), sliding_window=301
    ),
    "log sums without decode rows, soft cap": Case(MIXED, 56, 4, min_q_len=2, with_log_sums=True, soft_cap=2.0),
}


@pytest.mark.parametrize("name", some_always(CASES, "mixed rows and padding", "int8, sinks, soft cap and window"))
def test_it_agrees_with_the_oracle(name: str, interpret: Any) -> None:
    check(CASES[name], interpret)


def test_chunks_of_keys_merge_by_their_log_sums(interpret: Any) -> None:
    case = Case(((40, 150), (7, 7), (5, 300)), 56, 2, 2, 192, 128, with_log_sums=True)
    drawn, size = draw(case), 128
    outs, log_sums = [], []
    for start in range(0, 300, size):
        chunk = dataclasses.replace(
            case,
            rows=tuple((query_len, min(max(kv_len - start, 0), size)) for query_len, kv_len in case.rows),
            first_positions=tuple(kv_len - query_len - start for query_len, kv_len in case.rows),
        )
        out, log_sum = run(chunk, dataclasses.replace(drawn, table=drawn.table[:, start // case.page_size :]), interpret)
        outs.append(out)
        log_sums.append(log_sum)
    weights = np.exp(log_sums - np.max(log_sums, axis=0))[..., None]
    merged = (weights * outs).sum(axis=0) / weights.sum(axis=0)
    assert relative_error(merged, oracle(case, drawn)[0]) < 6e-3


@pytest.mark.parametrize(
    "case",
    [
        Case(((9, 9), (5, 70), (20, 70)), 40, q_heads=1, head_dim=192, head_dim_v=128),
        Case(((9, 9), (5, 70), (20, 130)), 40, q_heads=4, kv_heads=2, sliding_window=40, has_sinks=True, config=ALONE),
    ],
    ids=["values narrower than keys", "window and sinks, one consumer"],
)
def test_contiguous_keys_and_values(case: Case, interpret: Any) -> None:
    """Once the second row's keys and values are NaN, once those of its neighbours: KV tiles hold more than one row's."""
    drawn = draw(case)
    together = np.concatenate([*drawn.kv, np.full((case.kv_heads, 5, case.head_dim + case.head_dim_v), np.nan)], axis=1)
    together = together.swapaxes(0, 1)
    kv_lens, cu_q_lens = lengths(case)
    cu_kv_lens = jnp.cumsum(kv_lens, dtype=jnp.int32)

    @jax.jit
    def attend(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        group = case.q_heads // case.kv_heads
        starts = jnp.pad(cu_kv_lens, (1, 0))
        plan = plan_extend(kv_lens, cu_q_lens, case.num_tokens, group=group, cu_kv_lens=starts, config=case.config)
        return ragged_extend(
            q, keys, values, plan, scale=case.scale, sliding_window=case.sliding_window,
            sinks=jnp.asarray(drawn.sinks) if case.has_sinks else None, config=case.config, interpret=interpret,
        )  # fmt: skip

    expected, _ = oracle(case, drawn)
    key_row = np.searchsorted(np.asarray(cu_kv_lens), np.arange(len(together)), side="right")
    query_row = np.searchsorted(np.asarray(cu_q_lens)[1:], np.arange(case.num_tokens), side="right")
    for is_second in (True, False):
        poisoned = np.where(((key_row == 1) == is_second)[:, None, None], np.nan, together)
        keys, values = np.split(poisoned, [case.head_dim], axis=2)
        got = np.asarray(attend(*(jnp.asarray(x, case.dtype) for x in (drawn.q, keys, values))).astype(jnp.float32))
        wanted = ((query_row == 1) != is_second) & (query_row < 3)
        assert relative_error(got[wanted], expected[wanted]) < 6e-3
        assert not got[query_row == 3].any(), "padding tokens must give zeros"


@pytest.mark.parametrize("config", [ExtendConfig(), ALONE], ids=["two consumers", "one"])
def test_a_plan_covers_each_token_once_longest_first(config: ExtendConfig) -> None:
    rng = np.random.default_rng()
    plan = jax.jit(functools.partial(plan_extend, num_tokens=512, group=4, with_log_sums=True, config=config))
    for _ in range(10):
        q_lens = rng.multinomial(rng.integers(513), np.full(9, 1 / 9))
        kv_lens = q_lens + rng.integers(0, 300, 9) * (q_lens > 0)
        cu_q_lens = np.cumsum([0, *q_lens])
        first_positions = kv_lens - q_lens + rng.choice([-200, 0, 200], 9)
        plan_of_step = plan(
            jnp.asarray(kv_lens, jnp.int32), jnp.asarray(cu_q_lens, jnp.int32), first_positions=jnp.asarray(first_positions)
        )
        row, first, position, begin, end, kv_len, _ = np.asarray(plan_of_step.tiles).T
        assert (first % 8 == 0).all() and (first >= 0).all() and (first + config.tile_tokens(4) <= 512).all()
        covered = np.zeros(512, int)
        for tile in np.flatnonzero(end > begin):
            tokens = np.arange(first[tile] + begin[tile], first[tile] + end[tile])
            covered[tokens] += 1
            if kv_len[tile] == 0:
                assert (tokens >= cu_q_lens[-1]).all()
                continue
            r = row[tile]
            assert (cu_q_lens[r] <= tokens).all() and (tokens < cu_q_lens[r + 1]).all() and kv_len[tile] == kv_lens[r]
            positions = position[tile] + np.arange(begin[tile], end[tile])
            assert (positions == tokens - cu_q_lens[r] + first_positions[r]).all()
        assert (covered == 1).all()
        tile, index = np.divmod(np.asarray(plan_of_step.places), config.tile_tokens(4))
        assert (first[tile] + index == np.arange(512)).all() and (begin[tile] <= index).all() and (index < end[tile]).all()
        assert plan_of_step.ends[-1] == (end > begin).sum()
        costs = np.where(end > begin, np.clip(position + end, 0, kv_len), -1)
        assert (np.diff(costs) <= 0).all()


LINES = {  # (queries, keys) of rows
    "a prompt of 4k": [(4096, 4096)],
    "a prompt of 16k": [(16384, 16384)],
    "eight prompts of 1k": [(1024, 1024)] * 8,
    "a chunk on a long prefix and eight short prompts": [(512, 32000)] + [(200, 200)] * 8,
    "speculated tokens of 64 rows": [(4, 1000 + 113 * i) for i in range(64)],
}


@pytest.mark.parametrize("name", LINES)
def test_blocks_end_together(name: str) -> None:
    """Steps of the block that has most, against the best order there is: each item to the block that is free first."""
    config, groups = ExtendConfig(), 8
    q_lens, kv_lens = np.array(LINES[name]).T
    cu_q_lens = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
    plan = plan_extend(jnp.asarray(kv_lens, jnp.int32), cu_q_lens, int(q_lens.sum()), group=4, config=config)
    keys = np.asarray(plan.tiles[:, 2] + plan.tiles[:, 4])[: int(plan.ends[-1])]
    steps = np.repeat(-(-keys // config.block_kv), groups)
    taken = np.zeros(len(steps), int)

    def loads(block: int) -> int:
        load = 0

        def visit(item: Any, done: Any) -> Any:
            nonlocal load
            load += int(steps[item])
            taken[item] += 1
            return done

        with jax.disable_jit():
            Work(None, jnp.int32(len(steps)), jnp.int32(block), config.num_sms).for_each(visit)
        return load

    free = [0] * config.num_sms
    for item in steps:
        heapq.heapreplace(free, free[0] + int(item))
    assert max(map(loads, range(config.num_sms))) <= 1.06 * max(free)
    assert (taken == 1).all()


def test_reasons_against_a_shape() -> None:
    fine = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    assert unsupported(**fine) is None
    assert "head_dim 72" in (unsupported(**{**fine, "head_dim": 72}) or "")
    assert "page size 48" in (unsupported(**{**fine, "page_size": 48}) or "")
    assert "float32" in (unsupported(**{**fine, "dtype": "float32"}) or "")
    assert "page size 16 with int8 KV" in (unsupported(**{**fine, "page_size": 16, "kv_dtype": "int8"}) or "")
    assert unsupported(**{**fine, "page_size": 32, "kv_dtype": "int8"}) is None
    assert "values of 48" in (unsupported(**fine, head_dim_v=48) or "")
    assert "head_dim 32" in (unsupported(**{**fine, "head_dim": 32}) or "")
    assert unsupported(**{**fine, "head_dim": 256, "num_kv_heads": 16, "kv_dtype": "float8_e4m3fn"}) is None
    assert unsupported(**{**fine, "head_dim": 192}) is None
    assert "shared memory" in (unsupported(**fine, config=ExtendConfig(num_stages=3)) or "")
    assert "num_sms" in (unsupported(**fine, config=ExtendConfig(num_sms=0)) or "")
    assert "block_kv" in (unsupported(**{**fine, "head_dim": 64, "kv_dtype": "int8"}, config=ExtendConfig(block_kv=256)) or "")


def compiled(compile_for_h200: Callable[..., Any], case: Case, num_rows: int = 8) -> Any:
    """The report of `case` at the size of a server: 2048 tokens."""
    T, shape = 2048, jax.ShapeDtypeStruct
    is_quantized, width = case.kv_dtype is not None, case.head_dim + case.head_dim_v
    config = ExtendConfig.for_heads(case.head_dim, case.head_dim_v, is_quantized=is_quantized)
    group = case.q_heads // case.kv_heads
    options = {"scale": case.scale, "sliding_window": case.sliding_window, "soft_cap": case.soft_cap, "config": config}

    def attend(q: jax.Array, kv: Any, table: jax.Array, kv_lens: jax.Array, cu_lens: jax.Array, sinks: jax.Array) -> Any:
        plan = plan_extend(
            kv_lens, cu_lens, T, group=group, min_q_len=2, cu_kv_lens=None if case.page_size else cu_lens,
            first_positions=kv_lens if case.first_positions else None, with_log_sums=case.with_log_sums, config=config,
        )  # fmt: skip
        if case.with_log_sums:
            return extend_with_log_sums(q, kv[0], table, plan, jnp.int32(0), head_dim_v=case.head_dim_v, **options)
        both = {**options, "sinks": sinks if case.has_sinks else None}
        if not case.page_size:
            return ragged_extend(q, *kv, plan, **both)
        return paged_extend(q, *kv, table, plan, jnp.int32(0), head_dim_v=case.head_dim_v, **both)

    if case.page_size:
        pool = shape((1000, case.kv_heads, case.page_size, width), case.kv_dtype or case.dtype)
        kv: Any = (pool, shape((1000, case.kv_heads, 2, case.page_size), jnp.float32) if is_quantized else None)
    else:
        kv = tuple(shape((T, case.kv_heads, columns), case.dtype) for columns in (case.head_dim, case.head_dim_v))
    (report,) = compile_for_h200(
        attend, shape((T, case.q_heads, case.head_dim), case.dtype), kv, shape((num_rows, 64), jnp.int32),
        shape((num_rows,), jnp.int32), shape((num_rows + 1,), jnp.int32), shape((case.q_heads,), jnp.float32),
    ).gpu_kernels  # fmt: skip
    return report


COMPILED = {
    "Llama 3": Case((), 0, 32, 8, 128, 128),
    "Llama 3, float16, pages of 32": Case((), 0, 32, 8, 128, 128, page_size=32, dtype=jnp.float16),
    "Qwen 2, 7 heads per KV head, pages of 256": Case((), 0, 28, 4, 128, 128, page_size=256),
    "two KV heads, pages of 8": Case((), 0, 32, 2, 128, 128, page_size=8),
    "Phi 2": Case((), 0, 32, 32, 80, 80),
    "gpt-oss": Case((), 0, 64, 8, 64, 64, sliding_window=128, has_sinks=True),
    "sinks and window at 128": Case((), 0, 32, 8, 128, 128, sliding_window=128, has_sinks=True),
    "Gemma 2 27B": Case((), 0, 32, 16, 128, 128, sliding_window=4096, soft_cap=50.0),
    "Gemma 2 9B": Case((), 0, 16, 8, 256, 256, sliding_window=4096, soft_cap=50.0),
    "DeepSeek's widths": Case((), 0, 16, 16, 192, 128),
    "DeepSeek's widths, log sums": Case((), 0, 16, 16, 192, 128, with_log_sums=True),
    "Llama 3, log sums": Case((), 0, 32, 8, 128, 128, with_log_sums=True),
    "DeepSeek's prefill": Case((), 0, 16, 16, 192, 128, page_size=0),
    "BERT": Case((), 0, 12, 12, 64, 64, first_positions=(0,)),
    "ModernBERT, in a window": Case((), 0, 12, 12, 64, 64, first_positions=(0,), sliding_window=129),
    "a large encoder, in a window": Case((), 0, 32, 8, 128, 128, first_positions=(0,), sliding_window=129),
    "contiguous, sinks and window": Case((), 0, 32, 8, 128, 128, page_size=0, sliding_window=128, has_sinks=True),
    "contiguous, sinks and window at 256": Case((), 0, 16, 8, 256, 256, page_size=0, sliding_window=128, has_sinks=True),
    "values as wide as keys of 192": Case((), 0, 16, 16, 192, 192),
    "float8": Case((), 0, 32, 8, 128, 128, kv_dtype=jnp.float8_e4m3fn),
    "float8, sinks and window": Case((), 0, 64, 8, 64, 64, kv_dtype=jnp.float8_e4m3fn, sliding_window=128, has_sinks=True),
    "float8, DeepSeek's widths": Case((), 0, 16, 16, 192, 128, kv_dtype=jnp.float8_e4m3fn),
    "float8, Gemma 2 9B": Case((), 0, 16, 8, 256, 256, kv_dtype=jnp.float8_e4m3fn, sliding_window=4096, soft_cap=50.0),
    "int8": Case((), 0, 32, 8, 128, 128, kv_dtype=jnp.int8),
    "int8, float16, pages of 32, Gemma 3": Case(
        (), 0, 8, 4, 256, 256, page_size=32, dtype=jnp.float16, kv_dtype=jnp.int8, sliding_window=1024
    ),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", some_always(COMPILED, "Llama 3"))
def test_it_compiles_for_h200_without_spills(name: str, compile_for_h200: Callable[..., Any]) -> None:
    case = COMPILED[name]
    report = compiled(compile_for_h200, case)
    assert report.target == "sm_90a" and ("paged_extend" if case.page_size else "ragged_extend") in report.name, report
    assert report.spill_bytes == 0 and not report.warnings, report
