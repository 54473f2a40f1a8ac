"""The reference attention against the definition, over shapes, raggedness, options and dtypes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Bind, Heads, Step, attend, expected, fill, make_step, nan_pool, rounded, run, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.executor.kv_cache import ArraysLayout
from jaxserve.kernels.api import AttentionSpec
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_loop import ReferenceTuning

BACKEND = ReferenceAttention
# Small enough that a few dozen tokens fill several chunks, tiles and blocks.
SMALL = functools.partial(ReferenceAttention, tuning=ReferenceTuning(kv_chunk_tokens=8, q_tile_tokens=4, block_bytes=1 << 14))
F32_ERROR = 2e-6
BF16_ERROR = 2e-2  # of the rounded result; sums are float32


def check(step: Step, bind: Bind = BACKEND, **options: Any) -> None:
    as_arrays: dict[str, Any] = {name: jnp.asarray(value) if name == "sinks" else value for name, value in options.items()}
    want = expected(step, **options)
    np.testing.assert_allclose(run(bind, step, **as_arrays), want, atol=F32_ERROR, rtol=0)


@pytest.mark.parametrize("decode_q_len", [1, None])
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(4, 4, 16), 1),
        (Heads(8, 4, 64), 4),
        (Heads(8, 2, 80), 16),
        (Heads(8, 1, 128), 64),
        (Heads(4, 2, 128), 128),
        (Heads(3, 1, 64), 16),
    ],
)
def test_shapes(heads: Heads, page_size: int, decode_q_len: int | None) -> None:
    decode = [(1, 1), (1, page_size), (1, page_size + 1), (1, 2 * page_size), (1, 200), (1, 33)]
    rows = decode if decode_q_len else [(5, 5), (1, 150), (40, 200), (page_size, page_size), (page_size + 1, page_size + 1)]
    check(make_step(rows, heads, page_size=page_size, decode_q_len=decode_q_len))


@pytest.mark.parametrize("bind", [BACKEND, SMALL], ids=["default", "small"])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 7},
        {"sliding_window": 2**31 - 1},
        {"soft_cap": 1.5},
        {"scale": 0.7},
        {"sinks": np.array([0.5, -3.0, 20.0, 0.0], np.float32)},
        {"sliding_window": 9, "soft_cap": 3.0, "sinks": np.array([2.0, -1.0, 0.0, 9.0], np.float32)},
    ],
    ids=str,
)
def test_options(bind: Bind, options: dict[str, Any]) -> None:
    heads = Heads(4, 2, 16)
    check(make_step([(1, 60), (1, 1), (0, 0), (1, 8), (1, 9)], heads, decode_q_len=1), bind, **options)
    check(make_step([(4, 60), (1, 33), (0, 0), (3, 3), (2, 9)], heads, decode_q_len=4), bind, **options)
    check(make_step([(20, 60), (1, 33), (0, 0), (6, 6), (1, 1)], heads, num_tokens=32), bind, **options)


def test_padding_is_zero_wherever_it_stands() -> None:
    heads = Heads(4, 2, 16)
    for step in (
        make_step([(0, 0), (1, 9), (0, 0), (1, 5), (0, 0)], heads, decode_q_len=1),
        make_step([(0, 0), (2, 9), (0, 0), (3, 5), (1, 7)], heads, decode_q_len=3),
        make_step([(0, 0), (3, 9), (0, 0), (1, 5), (0, 0)], heads, num_tokens=16),
        make_step([(0, 0), (0, 0)], heads, num_tokens=4, max_pages=3),
        make_step([(0, 0), (0, 0)], heads, decode_q_len=1, max_pages=3),
    ):
        out = run(BACKEND, step)
        assert np.all(out[~step.is_live] == 0)
        np.testing.assert_allclose(out, expected(step), atol=F32_ERROR, rtol=0)


def test_layers_do_not_see_each_other() -> None:
    step = make_step([(1, 9), (6, 30)], Heads(4, 2, 16))
    for layer in range(3):
        np.testing.assert_allclose(run(BACKEND, step, num_layers=3, layer=layer), expected(step), atol=F32_ERROR, rtol=0)


@pytest.mark.parametrize("decode_q_len", [1, None])
def test_bfloat16(decode_q_len: int | None) -> None:
    rows = [(1, 70), (1, 4), (0, 0)] if decode_q_len else [(1, 70), (30, 90), (0, 0)]
    step = rounded(make_step(rows, Heads(8, 2, 64), page_size=16, decode_q_len=decode_q_len), jnp.bfloat16)
    np.testing.assert_allclose(run(BACKEND, step, jnp.bfloat16), expected(step), atol=BF16_ERROR, rtol=0)


# A value is off by up to half a step: of int8 1/254 of its row's largest, of e4m3 1/32 of itself (1/16 relative steps).
@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.01), ("float8_e4m3fn", 0.04)])
def test_quantized_keys_and_values(kv_dtype: str, error: float) -> None:
    step = make_step([(1, 60), (20, 33), (0, 0), (1, 1)], Heads(4, 2, 64), num_tokens=32)
    want = expected(step)

    def bind(spec: AttentionSpec) -> ReferenceAttention:
        return ReferenceAttention(dataclasses.replace(spec, kv_dtype=kv_dtype))

    out = run(bind, step, num_layers=2, layer=1)
    assert 0 < np.linalg.norm(out - want) / np.linalg.norm(want) < error


def test_large_scores_do_not_overflow() -> None:
    step = make_step([(1, 40), (9, 40)], Heads(4, 2, 16))
    want = expected(step, scale=300.0)  # scores of some thousands, so float32 has four digits left behind the point
    np.testing.assert_allclose(run(SMALL, step, scale=300.0), want, atol=1e-3, rtol=0)


def test_heads_split_over_devices() -> None:
    """Under shard_map each device attends with its heads and nothing is exchanged."""
    step = make_step([(1, 30), (9, 20), (0, 0)], Heads(8, 4, 16), num_tokens=16)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))
    whole = ReferenceAttention(spec_of(step, jnp.float32))
    shard = ReferenceAttention(dataclasses.replace(whole.spec, num_heads=4, num_kv_heads=2))
    heads, pages = P(None, "tensor"), ArraysLayout(shard.kv_pages(), step.num_pages, 2).specs()

    def layer(pool: Any, q: jax.Array, k: jax.Array, v: jax.Array, arguments: dict[str, jax.Array]) -> jax.Array:
        return attend(shard, pool, q, k, v, jnp.int32(0), arguments, None, 0.25)[0]

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(pages, heads, heads, heads, P()), out_specs=heads, check_vma=False)
    before = step.before(64)
    k, v = (jnp.asarray(before.new(x)) for x in (step.keys, step.values))
    pool = fill(whole, nan_pool(whole, step.num_pages), k, v, 0, before.plan_arguments())
    new = (jnp.asarray(x) for x in (step.q, step.new(step.keys), step.new(step.values)))
    out = jax.jit(sharded)(pool, *new, step.plan_arguments())
    np.testing.assert_allclose(out, expected(step, scale=0.25), atol=F32_ERROR, rtol=0)


@pytest.mark.parametrize("bind", [BACKEND, SMALL], ids=["default", "small"])
def test_a_row_does_not_depend_on_its_batch(bind: Bind) -> None:
    heads = Heads(4, 2, 64)
    rows = [(1, 37), (24, 90), (1, 128), (7, 7)]
    together = make_step(rows, heads, page_size=16, num_tokens=64)
    out = run(bind, together)
    for row in range(len(rows)):
        alone = make_step([rows[row], (0, 0)], heads, page_size=16, num_tokens=32, max_pages=together.page_table.shape[1])
        mine = together.token_rows == row
        alone.keys[0], alone.values[0] = together.keys[row], together.values[row]
        alone.q[: rows[row][0]] = together.q[mine]
        np.testing.assert_allclose(run(bind, alone)[: rows[row][0]], out[mine], atol=1e-6, rtol=0)


R, T, MAX_LEN, PAGES = 6, 24, 48, 160
lengths = st.integers(1, MAX_LEN)


@st.composite
def extend_rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    rows, free = [], T
    for _ in range(draw(st.integers(0, R))):
        if not free:
            break
        query_len = draw(st.integers(0, min(free, 17)))
        rows.append((query_len, query_len + draw(st.integers(0, MAX_LEN - query_len))) if query_len else (0, 0))
        free -= query_len
    return rows + [(0, 0)] * (R - len(rows))


@settings(max_examples=40, deadline=None)
@given(rows=extend_rows(), window=st.integers(1, 60), seed=st.integers(0, 99))
def test_any_extend(rows: list[tuple[int, int]], window: int, seed: int) -> None:
    step = make_step(rows, Heads(4, 2, 16), num_tokens=T, max_pages=MAX_LEN // 4, num_pages=PAGES, seed=seed)
    out = run(SMALL, step, sliding_window=jnp.int32(window))
    np.testing.assert_allclose(out, expected(step, sliding_window=window), atol=F32_ERROR, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.one_of(st.just((0, 0)), lengths.map(lambda n: (1, n))), min_size=R, max_size=R), seed=st.integers(0, 99)
)
def test_any_decode(rows: list[tuple[int, int]], seed: int) -> None:
    step = make_step(rows, Heads(4, 2, 16), decode_q_len=1, max_pages=MAX_LEN // 4, num_pages=PAGES, seed=seed)
    np.testing.assert_allclose(run(SMALL, step), expected(step), atol=F32_ERROR, rtol=0)
