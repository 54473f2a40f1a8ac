"""Attention that is not causal, as encoders have it, against the definition: of whole texts each token sees all others."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Bind, Heads, Step, expected, make_step, not_causal, rounded, run
from cpp_compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels.api import choose_backend
from jaxserve.kernels.native.attention import NativeAttention
from jaxserve.kernels.reference import ReferenceAttention
from jaxserve.kernels.reference_loop import ReferenceTuning
from jaxserve.kernels.spec import AttentionSpec, Chip

ERROR = 4e-6
BF16_ERROR = 2e-2  # of the rounded result; sums are float32
HEADS = Heads(4, 2, 16)

# Small enough that a few dozen tokens fill several chunks, tiles and blocks.
SMALL = functools.partial(ReferenceAttention, tuning=ReferenceTuning(kv_chunk_tokens=8, q_tile_tokens=4, block_bytes=1 << 14))
BINDS = [
    pytest.param(ReferenceAttention, id="reference"),
    pytest.param(SMALL, id="small"),
    pytest.param(NativeAttention, id="native", marks=needs_compiler),
]


def texts(*lengths: int) -> list[tuple[int, int]]:
    return [(length, length) for length in lengths]


def check(bind: Bind, step: Step, **options: Any) -> np.ndarray:
    """The result, which is as it must be."""
    as_given = dict(options)
    if "sinks" in as_given:
        as_given["sinks"] = jnp.asarray(as_given["sinks"])
    if "sliding_window" in as_given and bind is NativeAttention:
        as_given["static_window"] = as_given.pop("sliding_window")
    out = run(not_causal(bind), step, **as_given)
    np.testing.assert_allclose(out, expected(step, is_causal=False, **options), atol=ERROR, rtol=0)
    return out


@pytest.mark.parametrize("bind", BINDS)
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(4, 4, 16), 1),
        (Heads(12, 12, 64), 16),
        (Heads(8, 2, 80), 16),
        (Heads(6, 6, 20), 4),
        (Heads(8, 1, 128), 64),
        (Heads(3, 1, 7), 16),
    ],
)
def test_shapes(bind: Bind, heads: Heads, page_size: int) -> None:
    check(bind, make_step(texts(5, 1, 300, page_size, page_size + 1, 2, 65, 129), heads, page_size=page_size))


@pytest.mark.parametrize("bind", BINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 7},
        {"sliding_window": 65},
        {"sliding_window": 200},
        {"sliding_window": 2**31 - 1},
        {"soft_cap": 1.5},
        {"scale": 0.7},
        {"sinks": np.array([0.5, -3.0, 20.0, 0.0], np.float32)},
        {"sliding_window": 9, "soft_cap": 3.0, "sinks": np.array([2.0, -1.0, 0.0, 9.0], np.float32)},
    ],
    ids=str,
)
def test_options(bind: Bind, options: dict[str, Any]) -> None:
    out = check(bind, make_step(texts(260, 1, 0, 6, 9, 0, 33), HEADS, num_tokens=320, max_pages=70), **options)
    assert np.all(out[-11:] == 0)  # padding


@pytest.mark.parametrize("bind", BINDS)
def test_a_step_of_padding(bind: Bind) -> None:
    assert np.all(check(bind, make_step(texts(0, 0), HEADS, num_tokens=8, max_pages=3)) == 0)


@pytest.mark.parametrize("window", [None, 20])
def test_bfloat16(window: int | None) -> None:
    step = rounded(make_step(texts(90, 1, 30, 0), Heads(8, 2, 64), page_size=16, num_tokens=128), jnp.bfloat16)
    out = run(not_causal(ReferenceAttention), step, jnp.bfloat16, sliding_window=window)
    np.testing.assert_allclose(out, expected(step, is_causal=False, sliding_window=window), atol=BF16_ERROR, rtol=0)


@pytest.mark.parametrize("bind", BINDS)
def test_a_nan_stays_with_its_text(bind: Bind) -> None:
    step = make_step(texts(9, 130, 12), HEADS)
    step.keys[1][128] = np.nan
    is_nan = np.isnan(run(not_causal(bind), step)).any(axis=(1, 2))
    np.testing.assert_array_equal(is_nan, step.token_rows == 1)


@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize("bind", BINDS)
def test_a_text_gets_the_same_alone_and_among_others(bind: Bind, window: int | None) -> None:
    heads = Heads(12, 12, 64)
    together = make_step(texts(37, 150, 1, 90, 7), heads, page_size=16, num_tokens=288)
    # A static window for all backends, as models give it.
    out = run(not_causal(bind), together, static_window=window)
    for row, (length, _) in enumerate(together.rows):
        mine = together.token_rows == row
        alone = make_step(texts(length), heads, page_size=16, max_pages=together.page_table.shape[1])
        alone.keys[0][:], alone.values[0][:], alone.q[:] = together.keys[row], together.values[row], together.q[mine]
        found = run(not_causal(bind), alone, static_window=window)
        if bind is NativeAttention:
            np.testing.assert_array_equal(found, out[mine])
        else:
            np.testing.assert_allclose(found, out[mine], atol=1e-6, rtol=0)


R, MAX_LEN, PAGES = 5, 90, 120
lengths = st.lists(st.integers(0, MAX_LEN), min_size=R, max_size=R)


@settings(max_examples=25, deadline=None)
@given(lengths=lengths, window=st.integers(1, 100), seed=st.integers(0, 99))
def test_any_texts(lengths: list[int], window: int, seed: int) -> None:
    step = make_step(texts(*lengths), HEADS, num_tokens=R * MAX_LEN, max_pages=23, num_pages=PAGES, seed=seed)
    for bind in (ReferenceAttention, SMALL):
        check(bind, step, sliding_window=jnp.int32(window))


@needs_compiler
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, window=st.integers(1, 100), seed=st.integers(0, 99))
def test_any_texts_native(lengths: list[int], window: int, seed: int) -> None:
    step = make_step(texts(*lengths), HEADS, num_tokens=R * MAX_LEN, max_pages=23, num_pages=PAGES, seed=seed)
    check(NativeAttention, step, sliding_window=window)


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        pytest.param(Chip("cpu"), "native", marks=needs_compiler),
        (Chip("gpu", "NVIDIA A100", (8, 0), 108), "reference"),
        (Chip("tpu", "TPU v6 lite"), "pallas"),
    ],
)
def test_what_encoders_get(chip: Chip, name: str) -> None:
    dtype = "float32" if chip.platform == "cpu" else "bfloat16"
    assert choose_backend("auto", AttentionSpec(chip, 12, 12, 64, dtype, dtype, is_causal=False)).name == name
