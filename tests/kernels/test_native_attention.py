"""The C++ attention of CPUs against the definition. Where it cannot be built: test_native_fallback."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, Step, expected, make_step, run
from cpp_compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels.api import choose_backend
from jaxserve.kernels.native.attention import NativeAttention
from jaxserve.kernels.spec import AttentionSpec, Chip

pytestmark = needs_compiler

ERROR = 2e-6
SPEC = AttentionSpec(Chip("cpu"), 4, 2, 16, "float32", "float32", 4)


def check(step: Step, **options: Any) -> None:
    as_arrays: dict[str, Any] = {name: jnp.asarray(value) if name == "sinks" else value for name, value in options.items()}
    if "static_window" in options:
        options["sliding_window"] = options.pop("static_window")
    np.testing.assert_allclose(run(NativeAttention, step, **as_arrays), expected(step, **options), atol=ERROR, rtol=0)


@pytest.mark.parametrize("decode_q_len", [1, None])
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(4, 4, 16), 1),
        (Heads(14, 2, 64), 16),
        (Heads(8, 2, 80), 16),
        (Heads(6, 6, 20), 4),
        (Heads(8, 1, 128), 64),
        (Heads(4, 2, 256), 128),
        (Heads(3, 1, 7), 16),
    ],
)
def test_shapes(heads: Heads, page_size: int, decode_q_len: int | None) -> None:
    decode = [(1, 1), (1, page_size), (1, page_size + 1), (1, 2 * page_size), (1, 200), (1, 64)]
    rows = decode if decode_q_len else [(5, 5), (1, 150), (140, 200), (page_size, page_size), (page_size + 1, page_size + 1)]
    check(make_step(rows, heads, page_size=page_size, decode_q_len=decode_q_len))


@pytest.mark.parametrize(
    "options",
    [
        {"static_window": 1},
        {"static_window": 7},
        {"static_window": 70},
        {"static_window": 2**31 - 1},
        {"soft_cap": 1.5},
        {"scale": 0.7},
        {"sinks": np.array([0.5, -3.0, 20.0, 0.0], np.float32)},
        {"static_window": 9, "soft_cap": 3.0, "sinks": np.array([2.0, -1.0, 0.0, 9.0], np.float32)},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    heads = Heads(4, 2, 16)
    check(make_step([(1, 160), (1, 1), (0, 0), (1, 8), (1, 9)], heads, decode_q_len=1), **options)
    check(make_step([(4, 60), (1, 33), (0, 0), (3, 3), (2, 9)], heads, decode_q_len=4), **options)
    check(make_step([(120, 260), (1, 33), (0, 0), (6, 6), (1, 1)], heads, num_tokens=140), **options)


def test_padding_is_zero_wherever_it_stands() -> None:
    heads = Heads(4, 2, 16)
    for step in (
        make_step([(0, 0), (1, 9), (0, 0), (1, 5), (0, 0)], heads, decode_q_len=1),
        make_step([(0, 0), (2, 9), (0, 0), (3, 5), (1, 7)], heads, decode_q_len=3),
        make_step([(0, 0), (3, 9), (0, 0), (1, 5), (0, 0)], heads, num_tokens=16),
        make_step([(0, 0), (0, 0)], heads, num_tokens=4, max_pages=3),
    ):
        assert np.all(run(NativeAttention, step)[~step.is_live] == 0)


def test_layers_do_not_see_each_other() -> None:
    step = make_step([(1, 9), (6, 30)], Heads(4, 2, 16))
    for layer in range(3):
        np.testing.assert_allclose(run(NativeAttention, step, num_layers=3, layer=layer), expected(step), atol=ERROR, rtol=0)


def test_large_scores_do_not_overflow() -> None:
    step = make_step([(1, 40), (9, 140)], Heads(4, 2, 16))
    np.testing.assert_allclose(run(NativeAttention, step, scale=300.0), expected(step, scale=300.0), atol=1e-3, rtol=0)


def test_a_nan_stays_with_its_row() -> None:
    step = make_step([(1, 9), (3, 30), (1, 12)], Heads(4, 2, 16))
    step.keys[1][4] = np.nan
    is_nan = np.isnan(run(NativeAttention, step)).any(axis=(1, 2))
    np.testing.assert_array_equal(is_nan, step.token_rows == 1)


def cut_at(step: Step, row: int, first: int, count: int) -> Step:
    """The row's queries [first, first + count), in a step of their own."""
    query_len, kv_len = step.rows[row]
    mine = np.flatnonzero(step.token_rows == row)[first : first + count]
    end = kv_len - query_len + first + count
    alone = make_step([(count, end)], step.heads, page_size=step.page_size, max_pages=step.page_table.shape[1])
    alone.keys[0][:], alone.values[0][:], alone.q[:] = step.keys[row][:end], step.values[row][:end], step.q[mine]
    return alone


def test_a_token_gets_the_same_bits_in_any_batch_and_any_chunk() -> None:
    step = make_step([(1, 37), (124, 290), (1, 128), (7, 7)], Heads(14, 2, 64), page_size=16, num_tokens=256)
    out = run(NativeAttention, step)
    for row, first, count in [(0, 0, 1), (1, 0, 124), (1, 0, 33), (1, 33, 91), (1, 123, 1), (2, 0, 1), (3, 2, 5)]:
        mine = np.flatnonzero(step.token_rows == row)[first : first + count]
        np.testing.assert_array_equal(run(NativeAttention, cut_at(step, row, first, count)), out[mine])


R, T, MAX_LEN, PAGES = 4, 24, 100, 160


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, MAX_LEN - 6)), min_size=R, max_size=R),
    window=st.integers(1, 110),
    seed=st.integers(0, 99),
)
def test_any_extend(lengths: list[tuple[int, int]], window: int, seed: int) -> None:
    rows = [(new, new + before) if new else (0, 0) for new, before in lengths]
    step = make_step(rows, Heads(4, 2, 16), num_tokens=T, max_pages=MAX_LEN // 4, num_pages=PAGES, seed=seed)
    check(step, static_window=window)


def test_it_is_what_cpus_get() -> None:
    assert choose_backend("auto", SPEC).name == "native"
