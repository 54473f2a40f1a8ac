"""Paged decode on Hopper: interpreted against a float64 oracle, compiled for H200 over its config matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.pallas.gpu import decode as gpu_decode
from jaxserve.kernels.pallas.gpu.decode import DecodeConfig, paged_decode, plan_decode, unsupported
from jaxserve.kernels.pallas.gpu.decode_plan import Segment, Shape, Stream, for_each_segment, segments_of
from jaxserve.kernels.pallas.gpu.dequant import is_quantized
from tests.accelerator.conftest import relative_error, some_always

# NaN is what the interpreter's uninitialised memory holds, and what poisons these cases.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")

GARBAGE = np.array([2**31 - 1, -1, -(2**31), 1 << 30], np.int32)
SMALL = DecodeConfig(num_sms=2)
LENGTHS = (70, 0, 64, 1, 200)  # more than a page of 64, none, exactly one, one token, several; split inside rows
FP8, BF16, F16 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16


@dataclasses.dataclass(frozen=True)
class Case:
    """Whatever no query may see is NaN, scales included; page-table entries before the window and past the end are nonsense."""

    kv_lens: tuple[int, ...] = LENGTHS
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None  # of each row; None: q_len
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_v: int = 0  # 0: head_dim
    page_size: int = 64
    dtype: Any = BF16
    kv_dtype: Any = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    query_size: float = 1.0  # queries are so much larger, and the scales of keys smaller
    value_sizes: tuple[float, float] = (1.0, 1.0)  # of scales of values: from a row's first token to its last
    config: DecodeConfig = SMALL

    @property
    def values(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.kv_dtype or self.dtype)

    def num_queries(self, row: int) -> int:
        return self.q_len if self.q_lens is None else self.q_lens[row]

    def first_seen(self, row: int) -> int:
        """The oldest token that any of a row's queries sees."""
        if self.sliding_window is None:
            return 0
        return max(0, self.kv_lens[row] - self.num_queries(row) + 1 - self.sliding_window)

    def options(self, sinks: Any) -> dict[str, Any]:
        return {
            "head_dim_v": self.values, "scale": self.head_dim**-0.5, "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap, "sinks": sinks if self.has_sinks else None, "config": self.config,
        }  # fmt: skip


def attend(case: Case, q: Any, pool: Any, scales: Any, table: Any, kv_lens: Any, offset: Any, sinks: Any, **more: Any) -> Any:
    plan = plan_decode(
        kv_lens, None if case.q_lens is None else jnp.asarray(case.q_lens, jnp.int32), q_len=case.q_len,
        num_kv_heads=case.heads[1], sliding_window=case.sliding_window, config=case.config,
    )  # fmt: skip
    return paged_decode(q, pool, scales, table, plan, offset, **case.options(sinks), **more)


@dataclasses.dataclass(frozen=True)
class Drawn:
    q: np.ndarray  # [R, q_len, Hq, Dk]
    pool: np.ndarray  # [P, Hkv, page_size, Dk + Dv]
    scales: np.ndarray | None  # [P, Hkv, 2, page_size]
    table: np.ndarray  # [R, max_pages]
    page_offset: int
    kv: list[np.ndarray]  # per row [Hkv, kv_len, Dk + Dv]
    sinks: np.ndarray  # [Hq]


def draw(case: Case, seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    size, hkv, width = case.page_size, case.heads[1], case.head_dim + case.values
    counts = [-(-kv_len // size) for kv_len in case.kv_lens]
    page_offset, num_pages = 3, sum(counts) + 2
    free = rng.permutation(num_pages)
    stored = np.full((page_offset + num_pages, hkv, size, width), np.nan)
    scales = np.full((page_offset + num_pages, hkv, 2, size), np.nan, np.float32)
    table = rng.choice(GARBAGE, (len(counts), max(counts) + 2))
    kv = []
    for row, (kv_len, count) in enumerate(zip(case.kv_lens, counts, strict=True)):
        seen = case.first_seen(row)
        table[row, seen // size : count], pages, free = free[seen // size : count], free[:count], free[count:]
        value = _round(
            rng.standard_normal((hkv, kv_len, width)) * (40 if case.is_quantized else 1), case.kv_dtype or case.dtype
        )
        scale = rng.uniform(0.01, 0.05, (hkv, kv_len, 2)).astype(np.float32) if case.is_quantized else np.ones((hkv, kv_len, 2))
        scale = scale / np.stack(np.broadcast_arrays(case.query_size, 1 / np.geomspace(*case.value_sizes, kv_len)), axis=-1)
        scale = scale.astype(np.float32).astype(np.float64)
        for i, page in enumerate(page_offset + pages):
            part = slice(max(i * size, seen), min((i + 1) * size, kv_len))
            if part.start < part.stop:
                inside = slice(part.start - i * size, part.stop - i * size)
                stored[page, :, inside] = value[:, part]
                scales[page, :, :, inside] = scale[:, part].transpose(0, 2, 1)
        kv.append(value * np.repeat(scale, [case.head_dim, case.values], axis=2))
    if case.kv_dtype == jnp.int8:
        stored = np.where(np.isnan(stored), -128, stored)
    q = _round(rng.standard_normal((len(counts), case.q_len, case.heads[0], case.head_dim)) * case.query_size, case.dtype)
    return Drawn(q, stored, scales if case.is_quantized else None, table, page_offset, kv, rng.standard_normal(case.heads[0]))


def _round(x: np.ndarray, dtype: Any) -> np.ndarray:
    """To values that `dtype` can hold, as float64."""
    if jnp.dtype(dtype) == jnp.int8:
        return np.clip(np.round(x), -127, 127)
    return x.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


def oracle(case: Case, drawn: Drawn) -> np.ndarray:
    """Attention by definition, one query head at a time, in float64; zeros where a row has no such query."""
    out = np.zeros((*drawn.q.shape[:3], case.values))
    group = case.heads[0] // case.heads[1]
    for row, query, head in np.ndindex(*drawn.q.shape[:3]):
        position = case.kv_lens[row] - case.num_queries(row) + query
        if position < 0 or query >= case.num_queries(row):
            continue
        first = max(0, position - case.sliding_window + 1) if case.sliding_window else 0
        keys, values = np.split(drawn.kv[row][head // group, first : position + 1], [case.head_dim], axis=1)
        scores = keys @ drawn.q[row, query, head] * case.head_dim**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        sink = np.exp(drawn.sinks[head]) if case.has_sinks else 0.0
        weights = np.exp(scores)
        out[row, query, head] = weights @ values / (weights.sum() + sink)
    return out


CASES = {
    "multi-head": Case(heads=(2, 2)),
    "one KV head, 16 query heads": Case(heads=(16, 1), kv_lens=(130, 3)),
    "heads that do not tile groups of eight": Case(heads=(6, 2), kv_lens=(70, 0, 3)),
    "one row of one head": Case(heads=(1, 1), kv_lens=(65,)),
    "head_dim 80": Case(head_dim=80, kv_lens=(70, 3)),
    "head_dim 96": Case(head_dim=96, kv_lens=(70, 3)),
    "head_dim 128, results in pieces": Case(head_dim=128, kv_lens=(70, 3), config=dataclasses.replace(SMALL, out_columns=32)),
    "head_dim 192/128": Case(head_dim=192, head_dim_v=128, kv_lens=(70, 3), config=dataclasses.replace(SMALL, out_columns=32)),
    "head_dim 256, one stream": Case(head_dim=256, kv_lens=(70, 3), config=DecodeConfig(num_sms=3, streams=1)),
    "pages of 8": Case(page_size=8, kv_lens=(70, 0, 8, 17)),
    "pages of 32": Case(page_size=32, kv_lens=(70, 32, 33)),
    "pages of 256": Case(page_size=256, kv_lens=(300, 256, 5)),
    "float16": Case(dtype=F16),
    "many streams, few tiles": Case(kv_lens=(200, 10), config=DecodeConfig(num_sms=4, min_tiles=1)),
    "many segments to combine": Case(
        heads=(1, 1), kv_lens=(600,), config=DecodeConfig(num_sms=4, min_tiles=1, combine_unroll=2)
    ),
    "many segments to combine, two warpgroups, sinks": Case(
        heads=(16, 1), kv_lens=(600,), has_sinks=True, config=DecodeConfig(num_sms=4, min_tiles=1, combine_unroll=1)
    ),
    "four queries": Case(q_len=4, kv_lens=(65, 4, 0, 131, 64), heads=(4, 1)),
    "two queries of three heads": Case(q_len=2, kv_lens=(65, 2), heads=(3, 1)),
    "up to eight queries": Case(q_len=8, q_lens=(8, 1, 0, 3), kv_lens=(70, 64, 0, 130), heads=(4, 2), has_sinks=True),
    "up to eight queries, window": Case(q_len=8, q_lens=(3, 1, 8), kv_lens=(130, 65, 200), heads=(2, 1), sliding_window=60),
    "up to four queries, e4m3, window": Case(
        q_len=4, q_lens=(1, 4, 2), kv_lens=(130, 65, 3), heads=(16, 1), kv_dtype=FP8, sliding_window=60
    ),
    "more queries than tokens": Case(q_len=4, kv_lens=(2, 66), heads=(2, 1)),
    "window": Case(sliding_window=20),
    "window of a tile": Case(sliding_window=64, kv_lens=(64, 65, 128, 191)),
    "window of one": Case(sliding_window=1, kv_lens=(65, 64)),
    "window, four queries": Case(sliding_window=30, q_len=4, kv_lens=(66, 130, 200), heads=(2, 1)),
    "window, pages of 8": Case(sliding_window=20, page_size=8),
    "window, float16, several tiles": Case(sliding_window=100, dtype=F16, kv_lens=(300, 165)),
    "window, head_dim 80": Case(sliding_window=30, head_dim=80, kv_lens=(70, 3)),
    "window, e4m3, pages of 32": Case(sliding_window=20, kv_dtype=FP8, page_size=32),
    "window, int8": Case(sliding_window=100, kv_dtype=jnp.int8, kv_lens=(300, 165)),
    "soft cap": Case(soft_cap=2.0),
    "sinks": Case(has_sinks=True),
    "all options": Case(sliding_window=70, soft_cap=2.0, has_sinks=True, q_len=2, kv_lens=(66, 0, 200)),
    "int8": Case(kv_dtype=jnp.int8),
    "e4m3": Case(kv_dtype=FP8),
    "e4m3 in float16": Case(kv_dtype=FP8, dtype=F16, kv_lens=(70, 3)),
    "int8 in float16, all options": Case(
        kv_dtype=jnp.int8, dtype=F16, sliding_window=70, soft_cap=2.0, has_sinks=True, q_len=2, kv_lens=(66, 0, 200)
    ),
    "e4m3, queries beyond float16": Case(kv_dtype=FP8, query_size=1e6, has_sinks=True),
    "e4m3, queries below float16": Case(kv_dtype=FP8, query_size=1e-9, soft_cap=2.0),
    "e4m3, values beyond float16": Case(kv_dtype=FP8, value_sizes=(1e9, 1e9)),
    "e4m3, values below float16": Case(kv_dtype=FP8, value_sizes=(1e-9, 1e-9), has_sinks=True),
    "e4m3, values that grow": Case(kv_dtype=FP8, value_sizes=(1e-9, 1e3), dtype=F16, kv_lens=(70, 300)),
    "int8 in float16, values that shrink": Case(kv_dtype=jnp.int8, value_sizes=(1e3, 1e-9), dtype=F16, kv_lens=(70, 300)),
    "int8, head_dim 80, pages of 32": Case(kv_dtype=jnp.int8, head_dim=80, page_size=32, kv_lens=(70, 3)),
    "e4m3, pages of 256, one stream": Case(
        kv_dtype=FP8, page_size=256, kv_lens=(300, 5), config=DecodeConfig(num_sms=2, streams=1, stages=3)
    ),
    "int8, tiles of 32": Case(kv_dtype=jnp.int8, kv_lens=(70, 3), config=dataclasses.replace(SMALL, block_kv=32)),
}


@pytest.mark.parametrize("name", some_always(CASES, "all options", "e4m3"))
def test_the_interpreted_kernel_is_right(interpret: Any, name: str) -> None:
    case = CASES[name]
    drawn = draw(case, seed=len(name))
    pool = jnp.asarray(drawn.pool, case.kv_dtype or case.dtype)
    arguments = (
        jnp.asarray(drawn.q, case.dtype), pool, None if drawn.scales is None else jnp.asarray(drawn.scales),
        jnp.asarray(drawn.table), jnp.asarray(case.kv_lens, jnp.int32), jnp.int32(drawn.page_offset),
        jnp.asarray(drawn.sinks, jnp.float32),
    )  # fmt: skip
    got = jax.jit(lambda *arguments: attend(case, *arguments, interpret=interpret))(*arguments)
    assert got.dtype == case.dtype
    expected = oracle(case, drawn)
    limit = 1e-3 if case.dtype == F16 else 5e-3
    for row, kv_len in enumerate(case.kv_lens):
        assert kv_len == 0 or relative_error(got[row], expected[row]) < limit, row
    empty = [row for row, kv_len in enumerate(case.kv_lens) if kv_len == 0]
    assert not np.asarray(got, np.float32)[empty].any(), "rows without tokens must give zeros"


def test_a_step_without_tokens_gives_zeros(interpret: Any) -> None:
    case = Case(kv_lens=(0, 0), heads=(2, 1))
    q, pool = jnp.full((2, 1, 2, 64), jnp.nan, BF16), jnp.full((3, 1, 64, 128), jnp.nan, BF16)
    table, kv_lens = jnp.full((2, 2), 2**31 - 1, jnp.int32), jnp.zeros(2, jnp.int32)
    got = attend(case, q, pool, None, table, kv_lens, 0, None, interpret=interpret)
    assert not np.asarray(got, np.float32).any()


@pytest.mark.parametrize("sliding_window", [None, 1, 64, 100])
@pytest.mark.parametrize("q_len", [1, 4])
def test_the_plan_gives_every_tile_to_one_stream(q_len: int, sliding_window: int | None) -> None:
    rng = np.random.default_rng(q_len)
    config = DecodeConfig(num_sms=5, min_tiles=2)
    kv_lens = np.where(rng.random(23) < 0.3, 0, rng.integers(1, 3000, 23))
    plan = plan_decode(jnp.asarray(kv_lens), q_len=q_len, num_kv_heads=3, sliding_window=sliding_window, config=config)
    first = np.maximum(kv_lens - (q_len - 1) - (sliding_window or 1 << 30), 0) // 64
    counts = -(-kv_lens // 64) - first
    items = np.repeat(np.arange(23 * 3), np.repeat(counts, 3))  # the item of every tile on the line
    per_stream = max(2, -(-len(items) // config.num_streams))
    starts = np.cumsum(counts) - counts
    queries = [np.full(23, q_len)] if q_len > 1 else []
    assert np.array_equal(plan.rows, np.stack([kv_lens, starts, *queries], axis=1))
    for number, got in enumerate(np.asarray(plan.streams)):
        stream, mine = Stream(*got), items[number * per_stream : (number + 1) * per_stream]
        assert stream.num_tiles == len(mine) and stream.tiles_per_stream == per_stream
        if len(mine):
            row = mine[0] // 3
            assert (stream.row, stream.kv_len, stream.start) == (row, kv_lens[row], starts[row])


@pytest.mark.parametrize("sliding_window", [None, 100])
def test_the_streams_segments_are_the_line(sliding_window: int | None) -> None:
    """What each stream visits, in order, is the line of all tiles, cut; and each segment is where its item looks for it."""
    rng = np.random.default_rng(0)
    config = DecodeConfig(num_sms=5, min_tiles=2)
    kv_lens = np.where(rng.random(23) < 0.5, 0, rng.integers(1, 1000, 23))
    plan = plan_decode(jnp.asarray(kv_lens), q_len=1, num_kv_heads=3, sliding_window=sliding_window, config=config)
    shape = Shape(23, 1, 3, 3, 64, 64, 64, sliding_window, config)
    found: list[tuple[int, ...]] = []
    with jax.disable_jit():
        for number in range(config.num_streams):
            for_each_segment(shape, plan, jnp.int32(number), lambda segment, _: found.append(numbers(segment)))
        for row, head in np.ndindex(23, 3):
            first, end = map(int, segments_of(shape, plan, jnp.int32(row), jnp.int32(head), 0))
            assert [number for number, *item, _, _ in found if item == [row, head]] == list(range(first, end))
    first_tiles = np.maximum(kv_lens - (sliding_window or 1 << 30), 0) // 64
    line = [(r, h, t) for r in range(23) for h in range(3) for t in range(first_tiles[r], -(-kv_lens[r] // 64))]
    assert [(row, head, tile) for _, row, head, begin, end in found for tile in range(begin, end)] == line


def numbers(segment: Segment) -> tuple[int, ...]:
    return tuple(map(int, (segment.number, segment.row, segment.head, segment.begin, segment.end)))


def test_few_rows_are_combined_by_many_warpgroups_many_by_one() -> None:
    found = [Shape(rows, 1, 32, 8, 128, 128, 64, None, DecodeConfig()).combine_warpgroups for rows in (1, 4, 16, 64, 256)]
    assert found == [8, 8, 2, 1, 1]


def test_the_plan_of_nothing_gives_no_work() -> None:
    plan = plan_decode(jnp.zeros(4, jnp.int32), q_len=1, num_kv_heads=2)
    assert not any(Stream(*line).num_tiles for line in np.asarray(plan.streams))
    assert Stream(*plan.streams[0]).tiles_per_stream > 0


GOOD: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, "dtype": BF16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float32}, "queries must be bfloat16 or float16, not float32"),
        ({"kv_dtype": jnp.float32}, "the KV cache must be bfloat16 like the queries, float8_e4m3fn or int8, not float32"),
        ({"head_dim": 72}, "not (72, 72)"),
        ({"page_size": 48}, "page size must be one of 8, 16, 32, 64, 128, 256, not 48"),
        ({"page_size": 16, "kv_dtype": FP8}, "page size must be 32 or more with a float8_e4m3fn KV cache, not 16"),
        ({"num_heads": 34, "num_kv_heads": 2}, "query heads per KV head must be 1 to 16, not 34/2"),
        ({"num_heads": 6, "num_kv_heads": 4}, "query heads per KV head must be 1 to 16, not 6/4"),
        ({"q_len": 17}, "queries per row must be 1 to 16 with 4 query heads per KV head, not 17"),
        ({"q_len": 5, "num_kv_heads": 2}, "queries per row must be 1 to 4 with 16 query heads per KV head, not 5"),
        ({"config": DecodeConfig(stages=4)}, "bytes of shared memory"),
    ],
)
def test_what_it_cannot_do_is_said(changes: dict[str, Any], reason: str) -> None:
    assert unsupported(**GOOD) is None
    assert reason in (unsupported(**(GOOD | changes)) or "")


def test_an_unsupported_call_raises_the_reason() -> None:
    case = Case(q_len=33, kv_lens=(9,))
    with pytest.raises(NotImplementedError, match="queries per row must be 1 to 32 with 2 query heads per KV head, not 33"):
        jax.eval_shape(
            lambda q, pool: attend(case, q, pool, None, jnp.zeros((1, 1), jnp.int32), jnp.array([9]), 0, None),
            jax.ShapeDtypeStruct((1, 33, 4, 64), BF16),
            jax.ShapeDtypeStruct((3, 2, 64, 128), BF16),
        )


def test_a_plan_of_another_config_is_refused() -> None:
    plan = plan_decode(jnp.array([9]), q_len=1, num_kv_heads=2, config=DecodeConfig(num_sms=3))
    q, pool = jnp.zeros((1, 1, 4, 64), BF16), jnp.zeros((3, 2, 64, 128), BF16)
    with pytest.raises(ValueError, match="The plan is for 6 streams, the config has 4"):
        paged_decode(q, pool, None, jnp.zeros((1, 1), jnp.int32), plan, 0, head_dim_v=64, scale=1.0, config=SMALL)


ALL_OPTIONS: dict[str, Any] = {"sliding_window": 1000, "soft_cap": 30.0, "has_sinks": True}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 8B": {},
    "multi-head": {"heads": (8, 8)},
    "16 heads, 4 queries": {"heads": (32, 2), "q_len": 4},
    "6 heads": {"heads": (12, 2), "q_len": 3},
    "4 heads, 16 queries, all options": {"q_len": 16, **ALL_OPTIONS},
    "e4m3, 8 queries, all options": {"q_len": 8, "kv_dtype": FP8, **ALL_OPTIONS},
    "int8, 7 heads, 8 queries": {"q_len": 8, "kv_dtype": jnp.int8, "heads": (28, 4)},
    "192/128, 8 queries, all options": {"q_len": 8, "head_dim": 192, "head_dim_v": 128, **ALL_OPTIONS},
    "all options, 4 queries": {"q_len": 4, **ALL_OPTIONS},
    "float16": {"dtype": F16},
    **{f"pages of {size}": {"page_size": size} for size in (8, 16, 32, 128, 256)},
    **{f"head_dim {d}": {"head_dim": d, "head_dim_v": dv} for d, dv in gpu_decode.HEAD_DIMS if d != 128},
    **{
        f"{name}, {d}": {"kv_dtype": dtype, "head_dim": d, "head_dim_v": dv}
        for name, dtype in (("int8", jnp.int8), ("e4m3", FP8))
        for d, dv in gpu_decode.HEAD_DIMS
    },
    "int8 in float16": {"kv_dtype": jnp.int8, "dtype": F16},
    "e4m3 in float16, all options, pages of 32": {"kv_dtype": FP8, "dtype": F16, "page_size": 32, "q_len": 4, **ALL_OPTIONS},
    "head_dim 64, all options": {"head_dim": 64, "q_len": 4, **ALL_OPTIONS},
    "head_dim 256, all options": {"head_dim": 256, "q_len": 4, "heads": (32, 2), **ALL_OPTIONS},
    "int8, 256, all options": {"head_dim": 256, "q_len": 4, "kv_dtype": jnp.int8, **ALL_OPTIONS},
    "e4m3, 96, all options": {"head_dim": 96, "kv_dtype": FP8, **ALL_OPTIONS},
}


@pytest.mark.compile
@pytest.mark.parametrize("name", some_always(SHAPES, "Llama 8B"))
def test_it_is_compiled_for_h200_without_spills(compile_for_h200: Callable[..., Any], name: str) -> None:
    case = Case(kv_lens=(1,) * 64, **({"heads": (32, 8), "head_dim": 128} | SHAPES[name]))
    config = DecodeConfig.for_heads(case.head_dim, case.values, is_quantized=case.is_quantized)
    case = dataclasses.replace(case, config=config)
    R, Hkv, size = 64, case.heads[1], case.page_size

    def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    facts = compile_for_h200(
        lambda *arguments: attend(case, *arguments),
        shape(R, case.q_len, case.heads[0], case.head_dim, dtype=case.dtype),
        shape(1000, Hkv, size, case.head_dim + case.values, dtype=case.kv_dtype or case.dtype),
        shape(1000, Hkv, 2, size, dtype=jnp.float32) if case.is_quantized else None,
        shape(R, 4096 // size), shape(R), shape(), shape(case.heads[0], dtype=jnp.float32),
    )  # fmt: skip
    assert facts.kernel_names == ("paged_decode", "paged_decode_combine")
    for report in facts.gpu_kernels:
        assert report.spill_bytes == 0 and not report.warnings, report
