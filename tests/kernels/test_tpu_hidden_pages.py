"""What no query may see is not read into results: pages before a sliding window, tails of last pages, pages of nobody.

A page before the window may have been given to another request: its entry in the page table is anything, what it holds too. So
everything but the slots of pages that a row's window reaches into is poisoned: with NaN, which any product would spread, and
with numbers like another request's but large, which no guard against NaN would catch. The interpreter fails on a page that
does not exist.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import GARBAGE, Heads, Step, attend, expected, fill, make_step, nan_pool, rounded, spec_of
from tpu_interpreter import INTERPRET, SMALL, WIDE, fail_on_races

from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.pallas.tpu.tuning import TpuConfig

pytestmark = pytest.mark.matrix
no_races = pytest.fixture(autouse=True)(fail_on_races)

POISONS = (np.nan, 1e4)


def first_pages(step: Step, window: int) -> list[int]:
    """Of each row, by position: the page of the first key that its first query sees."""
    return [max(0, kv_len - query_len - window + 1) // step.page_size for query_len, kv_len in step.rows]


def poisoned(pool: Any, step: Step, window: int, poison: float) -> Any:
    """The pool with nothing but the pages that windows reach into, as far as they have been written."""
    is_visible = np.zeros((step.num_pages, step.page_size), bool)
    for row, ((query_len, kv_len), first) in enumerate(zip(step.rows, first_pages(step, window), strict=True)):
        page_index, offsets = np.divmod(np.arange(first * step.page_size, kv_len - query_len), step.page_size)
        is_visible[step.page_table[row, page_index], offsets] = True

    def hide(x: jax.Array) -> jax.Array:
        # [pages, heads, page_size] of scales, or the same and the width of a row.
        visible = is_visible[:, None].reshape(step.num_pages, 1, step.page_size, *[1] * (x.ndim - 3))
        value = np.nan_to_num(poison, nan=-1) if x.dtype == jnp.int8 else poison
        bounded = np.clip(value, -127, 127) if x.dtype.itemsize == 1 else value
        return jnp.where(visible, x, jnp.full(x.shape, bounded, jnp.float32).astype(x.dtype))

    return jax.tree.map(hide, pool)


def hidden_entries(step: Step, window: int, entry: int) -> jax.Array:
    """The page table with `entry` for each page before the window."""
    table = step.page_table.copy()
    for row, first in enumerate(first_pages(step, window)):
        table[row, :first] = entry
    return jnp.asarray(table)


def attend_among_poison(
    step: Step, window: int | None, poison: float, entry: int | None, config: TpuConfig, dtype: Any = jnp.float32, **more: Any
) -> np.ndarray:
    backend = PallasTpuAttention(spec_of(step, dtype, **more), interpret=INTERPRET, override=config)
    reach = window or 1 << 30
    before = step.before(64)
    new = [jnp.asarray(before.new(x), dtype) for x in (step.keys, step.values)]
    pool = fill(backend, nan_pool(backend, step.num_pages), *new, jnp.int32(0), before.plan_arguments())
    pool = poisoned(pool, step, reach, poison)
    arguments = step.plan_arguments()
    if entry is not None:
        arguments["page_table"] = hidden_entries(step, reach, entry)
    now = [jnp.asarray(x, dtype) for x in (step.q, step.new(step.keys), step.new(step.values))]
    traced_window = None if window is None else jnp.int32(window)
    scale = step.heads.dim**-0.5
    out, _ = attend(backend, pool, *now, jnp.int32(0), arguments, step.decode_q_len, scale, traced_window)
    return np.asarray(out.astype(jnp.float32))


@pytest.mark.parametrize("window", [1, 6, None])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("decode_q_len", [1, None], ids=["decode", "mixed"])
def test_pages_of_a_few_tokens(decode_q_len: int | None, poison: float, window: int | None) -> None:
    """Chunks of two pages, blocks of four: windows begin in each page of both. Poisoned pages stay in the page table."""
    rows = ((1, 30), (0, 0), (1, 9), (1, 20), (1, 27)) if decode_q_len else ((1, 30), (21, 30), (3, 25), (9, 40), (1, 3))
    step = make_step(rows, Heads(4, 2, 16), num_tokens=40, decode_q_len=decode_q_len)
    got = attend_among_poison(step, window, poison, None, SMALL)
    np.testing.assert_allclose(got, expected(step, sliding_window=window), atol=2e-6, rtol=0)


@pytest.mark.parametrize("entry", [int(GARBAGE[0]), int(GARBAGE[2])])
@pytest.mark.parametrize("decode_q_len", [1, None], ids=["decode", "mixed"])
def test_entries_that_are_no_pages(decode_q_len: int | None, entry: int) -> None:
    rows = ((1, 30), (1, 9), (1, 20)) if decode_q_len else ((1, 30), (9, 25), (2, 40))
    step = make_step(rows, Heads(4, 2, 16), num_tokens=16, decode_q_len=decode_q_len)
    got = attend_among_poison(step, 6, np.nan, entry, SMALL)
    np.testing.assert_allclose(got, expected(step, sliding_window=6), atol=2e-6, rtol=0)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("kv_dtype", "error"), [("bfloat16", 1e-2), ("int8", 1.5e-2), ("float8_e4m3fn", 5e-2)])
def test_types(kv_dtype: str, error: float, poison: float) -> None:
    """Scales of hidden slots are poisoned as well."""
    step = make_step(((1, 300), (9, 290), (3, 140)), Heads(4, 2, 64), page_size=128, num_tokens=16)
    step = rounded(step, jnp.bfloat16)
    config = dataclasses.replace(WIDE, decode_queries=4)
    attended = functools.partial(attend_among_poison, config=config, dtype=jnp.bfloat16, kv_dtype=kv_dtype)
    got, want = attended(step, 100, poison, 0), expected(step, sliding_window=100)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < error
