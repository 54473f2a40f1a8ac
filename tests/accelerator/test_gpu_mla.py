"""MLA decode for Hopper: interpreted against attention by definition, and compiled for an H200 that is not there.

Whatever no query may look at is NaN, page-table entries past a row's end are nonsense.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.pallas.gpu import mla_kernel
from jaxserve.kernels.pallas.gpu.common import SMEM_BYTES
from jaxserve.kernels.pallas.gpu.mla import MlaConfig, mla_decode, mla_decode_with_log_sums, plan_mla_decode, unsupported
from jaxserve.kernels.pallas.gpu.mla_plan import TILE, Row, Shape, Worker
from jaxserve.kernels.pallas.gpu.softmax import Scoring
from tests.accelerator.conftest import relative_error, some_always

GARBAGE = np.array([2**31 - 1, -1, -(2**31), 1 << 30], np.int32)
SCALE = 0.07
TINY = MlaConfig(num_blocks=3, min_tiles=1)


@dataclasses.dataclass(frozen=True)
class Case:
    kv_lens: tuple[int, ...]
    num_heads: int = 16
    q_len: int = 1
    page_size: int = 64
    dtype: Any = jnp.bfloat16
    soft_cap: float | None = None
    sliding_window: int | None = None
    config: MlaConfig = TINY
    has_log_sums: bool = False


def step(case: Case, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, list[np.ndarray]]:
    """q, the pool of two layers (the first is all NaN), page_table, and each row's tokens [kv_len, 576] in float64."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
    num_pages = sum(counts) + 2
    free = list(rng.permutation(num_pages))
    pool = np.full((2 * num_pages, 1, case.page_size, 576), np.nan, dtype)
    table = rng.choice(GARBAGE, (len(counts), max(counts) + 2))
    tokens = []
    for row, (kv_len, count) in enumerate(zip(case.kv_lens, counts, strict=True)):
        padded = np.full((count * case.page_size, 576), np.nan)
        padded[:kv_len] = rng.standard_normal((kv_len, 576))
        table[row, :count] = [free.pop() for _ in range(count)]
        pool[num_pages + table[row, :count], 0] = padded.reshape(count, case.page_size, 576).astype(dtype)
        tokens.append(padded[:kv_len].astype(dtype).astype(np.float64))
    q = rng.standard_normal((len(counts), case.q_len, case.num_heads, 576)).astype(dtype)
    return jnp.asarray(q), jnp.asarray(pool), jnp.asarray(table, jnp.int32), tokens


def expected(case: Case, q: jax.Array, tokens: list[np.ndarray]) -> np.ndarray:
    """By definition, in float64."""
    out = np.zeros((*q.shape[:-1], 512))
    for row, kv in enumerate(tokens):
        for query in range(case.q_len if len(kv) else 0):
            end = len(kv) - case.q_len + 1 + query
            begin = 0 if case.sliding_window is None else max(0, end - case.sliding_window)
            scores = np.asarray(q[row, query]).astype(np.float64) @ kv[begin:end].T * SCALE
            if case.soft_cap is not None:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[row, query] = weights @ kv[begin:end, :512] / weights.sum(axis=1, keepdims=True)
    return out


def run(case: Case, q: jax.Array, pool: jax.Array, table: jax.Array, kv_lens: jax.Array, offset: Any, interpret: Any) -> Any:
    plan = plan_mla_decode(
        kv_lens, q_len=case.q_len, num_heads=case.num_heads, sliding_window=case.sliding_window, config=case.config
    )
    decode: Callable[..., Any] = mla_decode_with_log_sums if case.has_log_sums else mla_decode
    return decode(
        q, pool, table, plan, offset, scale=SCALE, soft_cap=case.soft_cap, sliding_window=case.sliding_window,
        config=case.config, interpret=interpret,
    )  # fmt: skip


CASES = {
    "lengths": Case((0, 1, 64, 70, 0)),
    "split": Case((300, 65)),
    "many parts": Case((330,), num_heads=8, config=MlaConfig(num_blocks=6, min_tiles=1, combine_unroll=2)),
    "no part is small": Case((200, 1), num_heads=8, config=MlaConfig(num_blocks=6, min_tiles=3)),
    "128 heads": Case((130,), num_heads=128, config=MlaConfig(num_blocks=4, min_tiles=1)),
    "24 heads, 2 queries": Case((129, 2), num_heads=24, q_len=2),
    "2 blocks of 40 rows": Case((100,), num_heads=40, q_len=2),
    "small pages": Case((75, 9), page_size=16),
    "large pages": Case((150, 128), page_size=128),
    "float16": Case((90,), dtype=jnp.float16),
    "window": Case((200, 30, 0), q_len=2, sliding_window=50),
    "soft cap": Case((80,), soft_cap=2.0),
}


@pytest.mark.parametrize("name", some_always(CASES, "window"))
def test_equals_attention_by_definition(name: str, interpret: Any) -> None:
    case = CASES[name]
    q, pool, table, tokens = step(case)
    kv_lens = jnp.array(case.kv_lens, jnp.int32)
    out = run(case, q, pool, table, kv_lens, jnp.int32(pool.shape[0] // 2), interpret)
    assert out.shape == (*q.shape[:-1], 512) and out.dtype == q.dtype
    for row, (got, want) in enumerate(zip(out, expected(case, q, tokens), strict=True)):
        if case.kv_lens[row] == 0:
            assert not jnp.any(got), f"row {row}"
        else:
            assert relative_error(got, want) < (2e-3 if case.dtype == jnp.float16 else 8e-3), f"row {row}"


LOG_SUMS = {
    "lengths, split": Case((0, 1, 64, 300, 0, 65), has_log_sums=True),
    "128 heads, soft cap": Case((130, 0), num_heads=128, soft_cap=2.0, has_log_sums=True),
    "blocks of 40 rows": Case((200, 3), num_heads=80, has_log_sums=True),
}


@pytest.mark.parametrize("name", some_always(LOG_SUMS, "lengths, split"))
def test_log_sums_are_of_all_scores(name: str, interpret: Any) -> None:
    case = LOG_SUMS[name]
    q, pool, table, tokens = step(case)
    out, log_sums = run(case, q, pool, table, jnp.array(case.kv_lens, jnp.int32), jnp.int32(pool.shape[0] // 2), interpret)
    assert log_sums.shape == q.shape[:-1] and log_sums.dtype == jnp.float32
    for row, (want, kv) in enumerate(zip(expected(case, q, tokens), tokens, strict=True)):
        if not len(kv):
            assert not jnp.any(out[row]) and np.all(np.isfinite(log_sums[row])) and np.all(log_sums[row] < -1e29), f"row {row}"
            continue
        assert relative_error(out[row], want) < 8e-3, f"row {row}"
        scores = np.asarray(q[row, 0]).astype(np.float64) @ kv.T * SCALE
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        np.testing.assert_allclose(log_sums[row, 0], np.log(np.exp(scores).sum(axis=1)), atol=1e-4, err_msg=f"row {row}")


@pytest.mark.parametrize("window", [None, 100])
def test_a_plan_gives_each_tile_to_one_worker(window: int | None) -> None:
    rng = np.random.default_rng()
    for num_rows, num_blocks, min_tiles in itertools.product((1, 5, 40), (1, 7, 132), (1, 4)):
        kv_lens = rng.integers(0, 3000, num_rows) * rng.integers(0, 2, num_rows)
        config = MlaConfig(num_blocks=num_blocks, min_tiles=min_tiles)
        plan = plan_mla_decode(jnp.asarray(kv_lens), q_len=2, num_heads=64, sliding_window=window, config=config)
        lines = [Row(*line) for line in np.asarray(plan.rows)]
        assert sorted(line.row for line in lines) == list(range(num_rows))
        first_tiles = 0 * kv_lens if window is None else np.maximum(kv_lens - 1 - window, 0) // TILE
        seen: dict[int, list[int]] = {row: [] for row in range(num_rows)}  # tiles, in order
        parts: dict[int, list[int]] = {row: [] for row in range(num_rows)}  # slots
        for index, worker in enumerate(Worker(*line) for line in np.asarray(plan.workers)):
            for line in lines[worker.first : worker.last]:
                begin, end = max(line.start, worker.start), min(line.end, worker.end)
                assert end > begin
                seen[line.row] += range(line.first_tile + begin - line.start, line.first_tile + end - line.start)
                parts[line.row].append(2 * index + (begin > worker.start))
        for line in lines:
            row = line.row
            assert seen[row] == list(range(first_tiles[row], -(-kv_lens[row] // TILE))) and line.kv_len == kv_lens[row]
            assert line.num_parts == len(parts[row])
            assert (
                parts[row]
                == [line.first_slot, *(2 * (line.first_worker + i) for i in range(1, line.num_parts))][: len(parts[row])]
            )


def test_says_what_it_can_not_do() -> None:
    fine: dict[str, Any] = {
        "num_heads": 128, "q_len": 1, "latent_dim": 512, "row_dim": 576, "page_size": 64, "dtype": jnp.bfloat16
    }  # fmt: skip
    assert unsupported(**fine) is None
    for change, word in [
        ({"num_heads": 12}, "heads"),
        ({"num_heads": 136}, "heads"),
        ({"q_len": 5}, "queries"),
        ({"latent_dim": 256}, "512"),
        ({"page_size": 48}, "page size"),
        ({"dtype": jnp.float8_e4m3fn}, "quantized"),
        ({"dtype": jnp.float32}, "float32"),
    ]:
        assert word in str(unsupported(**{**fine, **change})), change


COMPILED = [
    *(Case((), num_heads=heads) for heads in (16, 32, 64, 128)),
    Case((), num_heads=128, q_len=2),
    Case((), num_heads=16, q_len=2, page_size=8),
    Case((), num_heads=64, q_len=2, page_size=16, dtype=jnp.float16),
    Case((), num_heads=24, page_size=32),
    Case((), num_heads=128, page_size=128, dtype=jnp.float16),
    Case((), num_heads=40, q_len=2, page_size=256),
    Case((), num_heads=32, q_len=4, sliding_window=1000, soft_cap=30.0),
    Case((), num_heads=128, has_log_sums=True),
    # With smaller pages the older of the ptxas spills 4 to 16 bytes here.
    Case((), num_heads=16, has_log_sums=True),
]


@pytest.mark.compile
@pytest.mark.parametrize(("num_rows", "case"), [(1, COMPILED[0]), *((64, case) for case in COMPILED)])
def test_compiles_for_h200_without_spills(case: Case, num_rows: int, compile_for_h200: Callable[..., Any]) -> None:
    case, shape = dataclasses.replace(case, config=MlaConfig()), jax.ShapeDtypeStruct

    def decode(q: Any, pool: Any, table: Any, kv_lens: Any, offset: Any) -> Any:
        return run(case, q, pool, table, kv_lens, offset, None)

    facts = compile_for_h200(
        decode,
        shape((num_rows, case.q_len, case.num_heads, 576), case.dtype), shape((999, 1, case.page_size, 576), case.dtype),
        shape((num_rows, 30), jnp.int32), shape((num_rows,), jnp.int32), shape((), jnp.int32),
    )  # fmt: skip
    assert facts.gpu_kernels
    for report in facts.gpu_kernels:
        assert not report.spill_bytes and not report.stack_bytes and not report.warnings, report
    assert not facts.copies, "the result is combined in place"


def test_fits_shared_memory() -> None:
    shape = Shape(1, 1, 1, 128, 64, 66, jnp.bfloat16, Scoring(1.0), None, False, False, MlaConfig())
    buffers = [buffer for buffer in mla_kernel._scratch(shape) if hasattr(buffer, "memory_space")]
    used = sum(math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize for buffer in buffers)
    assert 220_000 < used < SMEM_BYTES - 1024, used  # Mosaic GPU aligns buffers to 1 KiB; barriers are 8 bytes
