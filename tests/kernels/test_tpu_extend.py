"""One extend pass of the TPU kernel over a part of each row's keys, interpreted: results and log sums by the definition."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import GARBAGE
from tpu_interpreter import INTERPRET, SMALL, WIDE, fail_on_races

from jaxserve.kernels.pallas.tpu.attention import extend_attention
from jaxserve.kernels.pallas.tpu.layout import RowLayout
from jaxserve.kernels.pallas.tpu.plan import plan_pass
from jaxserve.kernels.pallas.tpu.tuning import PassConfig

no_races = pytest.fixture(autouse=True)(fail_on_races)

SMALL_ROWS = RowLayout.of(48, 32)
SEES_NOTHING = -1e29  # a log sum below this


@dataclasses.dataclass(frozen=True)
class Row:
    q_len: int
    kv_len: int  # of the part of its keys
    position: int  # of its first query, counted from the part's first key


@dataclasses.dataclass(frozen=True)
class Shape:
    query_heads: int = 4
    kv_heads: int = 4
    groups: int = 1  # of heads, in the pool
    layout: RowLayout = SMALL_ROWS
    page_size: int = 4
    num_tokens: int = 64


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: np.ndarray  # [T, Hq, key_dim], NaN for padding
    keys: list[np.ndarray]  # per row [kv_len, Hkv, key_dim]
    values: list[np.ndarray]


def draw(rows: list[Row], shape: Shape) -> Inputs:
    rng = np.random.default_rng(0)
    layout = shape.layout
    q = rng.standard_normal((shape.num_tokens, shape.query_heads, layout.key_dim)).astype(np.float32)
    q[sum(row.q_len for row in rows) :] = np.nan
    keys, values = (
        [rng.standard_normal((row.kv_len, shape.kv_heads, dim)).astype(np.float32) for row in rows]
        for dim in (layout.key_dim, layout.value_dim)
    )
    return Inputs(q, keys, values)


def expected(rows: list[Row], shape: Shape, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((shape.num_tokens, shape.query_heads, shape.layout.value_dim))
    log_sums = np.full((shape.num_tokens, shape.query_heads), -np.inf)
    token = 0
    for row, keys, values in zip(rows, inputs.keys, inputs.values, strict=True):
        for i in range(row.q_len):
            count = min(max(row.position + i + 1, 0), row.kv_len)
            if count:
                seen_keys, seen_values = (
                    np.repeat(x[:count].astype(np.float64), shape.query_heads // shape.kv_heads, axis=1) for x in (keys, values)
                )
                scores = np.einsum("hd,khd->hk", inputs.q[token].astype(np.float64), seen_keys) * shape.layout.key_dim**-0.5
                log_sums[token] = np.logaddexp.reduce(scores, axis=1)
                out[token] = np.einsum("hk,khd->hd", np.exp(scores - log_sums[token][:, None]), seen_values)
            token += 1
    return out, log_sums


def fill_pool(rows: list[Row], shape: Shape, inputs: Inputs, dtype: Any) -> tuple[jax.Array, np.ndarray]:
    """The pool and the page table. What holds no key of the part is NaN, an entry that holds no page is nonsense."""
    rng = np.random.default_rng(1)
    page_counts = [-(-row.kv_len // shape.page_size) for row in rows]
    num_pages = sum(page_counts) + 2
    free = list(rng.permutation(num_pages))
    table = rng.choice(GARBAGE, (len(rows), 1, max(page_counts) + 1))
    pool = np.full((num_pages, *shape.layout.page_shape(shape.kv_heads, shape.page_size)), np.nan, np.float32)
    for r, (keys, values) in enumerate(zip(inputs.keys, inputs.values, strict=True)):
        as_rows = np.asarray(shape.layout.rows(jnp.asarray(keys), jnp.asarray(values)))
        for i in range(page_counts[r]):
            page = table[r, 0, i] = free.pop()
            tokens = as_rows[i * shape.page_size : (i + 1) * shape.page_size]
            pool[page, :, : len(tokens)] = tokens.swapaxes(0, 1)
    heads = (shape.groups, shape.kv_heads // shape.groups)
    return jnp.asarray(pool.reshape(num_pages, *heads, *pool.shape[2:]).swapaxes(0, 1), dtype), table


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def run_pass(shape: Shape, config: PassConfig, q: Any, pool: Any, table: Any, q_lens: Any, kv_lens: Any, positions: Any) -> Any:
    starts = jnp.cumsum(q_lens) - q_lens
    plan = plan_pass(starts, q_lens, kv_lens, shape.num_tokens, config, positions)
    scale = shape.layout.key_dim**-0.5
    return extend_attention(q, pool, plan, table, 0, layout=shape.layout, scale=scale, interpret=INTERPRET)


def attend(
    rows: list[Row],
    shape: Shape,
    inputs: Inputs,
    *,
    config: PassConfig = SMALL.extend,
    dtype: Any = jnp.float32,
    default_positions: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    pool, table = fill_pool(rows, shape, inputs, dtype)
    q_lens, kv_lens, positions = jnp.asarray([dataclasses.astuple(row) for row in rows], jnp.int32).T
    q = jnp.asarray(inputs.q, dtype)
    result = run_pass(shape, config, q, pool, table, q_lens, kv_lens, None if default_positions else positions)
    assert result.log_sums.dtype == jnp.float32
    return np.asarray(result.out, np.float64), np.asarray(result.log_sums, np.float64)


def check(rows: list[Row], shape: Shape, error: float = 2e-6, **how: Any) -> None:
    inputs = draw(rows, shape)
    if how.get("dtype") == jnp.bfloat16:
        inputs = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32), vars(inputs))
        inputs = Inputs(**inputs)
    (out, log_sums), (want, want_log_sums) = attend(rows, shape, inputs, **how), expected(rows, shape, inputs)
    sees = np.isfinite(want_log_sums)
    np.testing.assert_allclose(out, want, atol=error, rtol=0)
    np.testing.assert_allclose(log_sums[sees], want_log_sums[sees], atol=error, rtol=error)
    assert np.all(np.isfinite(log_sums)) and np.all(log_sums[~sees] < SEES_NOTHING)
    assert np.all(out[~sees] == 0)


def test_the_last_queries_of_all_keys() -> None:
    rows = [Row(17, 30, 13), Row(0, 0, 0), Row(3, 3, 0), Row(9, 20, 11)]
    check(rows, Shape(), default_positions=True)


PARTS = {
    "behind the keys": [Row(21, 13, 13), Row(5, 30, 100), Row(0, 0, 0), Row(3, 16, 17)],
    "into the keys": [Row(21, 13, 3), Row(20, 30, 25), Row(4, 1, 0), Row(3, 16, 14)],
    "before the keys": [Row(40, 10, -21), Row(5, 8, -9), Row(6, 7, -2), Row(9, 8, -8)],
    "without keys": [Row(9, 0, 4), Row(16, 9, 2), Row(20, 0, -40), Row(8, 0, 0)],
    "none at all": [Row(20, 0, 8), Row(10, 5, -10), Row(0, 3, 2), Row(0, 0, 0)],
}


@pytest.mark.parametrize("rows", PARTS.values(), ids=PARTS)
def test_queries(rows: list[Row]) -> None:
    check(rows, Shape())


@pytest.mark.matrix
@pytest.mark.parametrize("rows", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("shape", [Shape(groups=2), Shape(4, 2), Shape(12, 4, 2), Shape(layout=RowLayout.of(128))], ids=str)
def test_heads(shape: Shape, rows: list[Row]) -> None:
    """In several groups, and as groups of query heads."""
    check(rows, shape, config=dataclasses.replace(SMALL.extend, head_unroll=2, split_masked=False))


@pytest.mark.parametrize("tile_tokens", [16, pytest.param(256, marks=pytest.mark.matrix)])
def test_the_heads_of_deepseek(tile_tokens: int) -> None:
    """Chunks of 128 lanes and more; a tile's log sums take one row of lanes or two."""
    config = dataclasses.replace(WIDE.extend, block_tokens=tile_tokens, tile_tokens=tile_tokens, head_unroll=2)
    shape = Shape(2, 2, 1, RowLayout.of(192, 128), page_size=128, num_tokens=320)
    check([Row(270, 150, -30), Row(40, 300, 280)], shape, error=1e-2, config=config, dtype=jnp.bfloat16)


def test_parts_are_merged_to_the_whole() -> None:
    shape, part_tokens = Shape(groups=2), 16
    whole = [Row(17, 30, 13), Row(12, 12, 0), Row(30, 40, 10), Row(1, 33, 32)]
    inputs = draw(whole, shape)
    parts = []
    for first in range(0, 48, part_tokens):
        rows = [Row(r.q_len, min(max(r.kv_len - first, 0), part_tokens), r.position - first) for r in whole]
        keys, values = ([x[first : first + part_tokens] for x in xs] for xs in (inputs.keys, inputs.values))
        parts.append(attend(rows, shape, Inputs(inputs.q, keys, values)))
    outs, log_sums = (np.stack(x) for x in zip(*parts, strict=True))
    weights = np.exp(log_sums - np.logaddexp.reduce(log_sums, axis=0))
    merged = np.sum(outs * weights[..., None], axis=0)
    want, _ = expected(whole, shape, inputs)
    np.testing.assert_allclose(merged, want, atol=2e-6, rtol=0)
