"""The TPU kernels in Pallas' TPU interpreter, against the definition; races and reads out of bounds fail.

Interpreting takes long: `make test` has a few of these, `make aot` all, when something has changed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, Step, expected, make_step, nan_pool, not_causal, pack_qkv, rounded, run, spec_of
from tpu_interpreter import INTERPRET, SMALL, WIDE, fail_on_races

from jaxserve.kernels.api import AttentionMetadata
from jaxserve.kernels.pallas.tpu import kernel as tpu_kernel
from jaxserve.kernels.pallas.tpu import write as tpu_write
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention

F32_ERROR = 2e-6
bind_small = functools.partial(PallasTpuAttention, interpret=INTERPRET, override=SMALL)
bind_wide = functools.partial(PallasTpuAttention, interpret=INTERPRET, override=WIDE)

DECODE = ((1, 9), (0, 0), (1, 20), (1, 1), (1, 16))
MIXED = ((1, 17), (0, 0), (21, 30), (1, 1), (3, 3), (2, 9))


no_races = pytest.fixture(autouse=True)(fail_on_races)


def check(step: Step, bind: Any = bind_small, **options: Any) -> None:
    as_arrays = {name: jnp.asarray(value) if name == "sinks" else value for name, value in options.items()}
    np.testing.assert_allclose(run(bind, step, **as_arrays), expected(step, **options), atol=F32_ERROR, rtol=0)


def test_decode() -> None:
    check(make_step(DECODE, Heads(4, 2, 16), decode_q_len=1))


@pytest.mark.parametrize("decode_q_len", [3, pytest.param(7, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5, "sinks": np.array([0.5, -3.0, 20.0, 0.0], np.float32)}], ids=str)
def test_decode_of_several_queries(decode_q_len: int, options: dict[str, Any]) -> None:
    step = make_step(((3, 9), (0, 0), (1, 20), (2, 2), (3, 16)), Heads(4, 2, 16), decode_q_len=decode_q_len)
    check(step, **options)


@pytest.mark.matrix
def test_many_short_rows() -> None:
    """More than there are buffers for their pages, and places for their rows of the page table, at a time."""
    check(make_step([(1, 1 + row * 5 % 23) for row in range(19)], Heads(4, 2, 16), decode_q_len=1))


def test_mixed() -> None:
    check(make_step(MIXED, Heads(4, 2, 16), num_tokens=40))


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"sliding_window": 21}], ids=str)
def test_tiles_at_the_borders_of_masks_and_rows(options: dict[str, Any]) -> None:
    """Tiles begin at position 6, 14, 22: next to a chunk's last key, and 21 before another's first. Then rows share a tile."""
    check(make_step(((24, 30), (3, 3), (5, 20), (2, 40)), Heads(2, 1, 16), num_tokens=40), **options)


@pytest.mark.matrix
@pytest.mark.parametrize("split_masked", [False, True])
def test_a_tile_of_several_heads_and_products(monkeypatch: pytest.MonkeyPatch, split_masked: bool) -> None:
    """16 rows per head and tile, 8 per product: two heads are four parts, each begun before the one before it is through."""
    monkeypatch.setattr(tpu_kernel, "PRODUCT_ROWS", 8)
    extend = dataclasses.replace(SMALL.extend, head_unroll=2, split_masked=split_masked)
    bind = functools.partial(bind_small, override=dataclasses.replace(SMALL, extend=extend))
    sinks = np.array([0.5, -3.0, 20.0, 0.0], np.float32)
    check(make_step(((24, 30), (3, 3), (0, 0), (2, 40)), Heads(4, 2, 16), num_tokens=40), bind, sliding_window=21, sinks=sinks)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_window": 6, "sinks": np.array([0.5, -3.0, 20.0, 0.0], np.float32)},
        {"static_window": 1},
        {"static_window": 17, "soft_cap": 3.0},
        {"static_window": 2**31 - 1},
    ],
    ids=str,
)
def test_texts_of_an_encoder(options: dict[str, Any]) -> None:
    """Of more and of fewer tokens than the decode pass takes, some of which share a tile."""
    step = make_step([(n, n) for n in (37, 1, 3, 0, 9, 2, 16)], Heads(4, 2, 16), num_tokens=80)
    as_arrays = {name: jnp.asarray(value) if name == "sinks" else value for name, value in options.items()}
    of_definition = {name.replace("static", "sliding"): value for name, value in options.items()}
    want = expected(step, is_causal=False, **of_definition)
    np.testing.assert_allclose(run(not_causal(bind_small), step, **as_arrays), want, atol=F32_ERROR, rtol=0)


@pytest.mark.matrix
def test_nothing_to_do() -> None:
    check(make_step([(0, 0), (0, 0)], Heads(2, 1, 16), decode_q_len=1, max_pages=2))
    check(make_step([(0, 0), (0, 0)], Heads(2, 1, 16), num_tokens=16, max_pages=2))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sliding_window": 1}, marks=pytest.mark.matrix),
        pytest.param({"sliding_window": 7}, marks=pytest.mark.matrix),
        pytest.param({"sliding_window": 2**31 - 1}, marks=pytest.mark.matrix),
        pytest.param({"soft_cap": 1.5, "scale": 0.7}, marks=pytest.mark.matrix),
        pytest.param({"sinks": np.array([0.5, -3.0, 20.0, 0.0], np.float32)}, marks=pytest.mark.matrix),
        {"sliding_window": 9, "soft_cap": 3.0, "sinks": np.array([2.0, -1.0, 0.0, 9.0], np.float32)},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    check(make_step(((1, 27), (0, 0), (10, 30), (6, 6)), Heads(4, 2, 16), num_tokens=24), **options)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(2, 2, 64), 16),  # key and value share 128 lanes
        (Heads(3, 1, 80), 32),  # a group that divides nothing
        (Heads(8, 1, 128), 64),
        (Heads(2, 1, 192), 128),  # the value starts in the middle of 128 lanes
        (Heads(4, 2, 256), 256),
    ],
    ids=str,
)
def test_shapes(heads: Heads, page_size: int) -> None:
    rows = ((1, 2 * page_size), (19, page_size + 10), (1, 33), (5, 5))
    step = make_step(rows, heads, page_size=page_size, num_tokens=32)
    config = dataclasses.replace(WIDE, min_write_group=min(32, page_size))
    check(step, functools.partial(PallasTpuAttention, interpret=INTERPRET, override=config))


@pytest.mark.matrix
@pytest.mark.parametrize(("kv_dtype", "error"), [("bfloat16", 1e-2), ("int8", 1.5e-2), ("float8_e4m3fn", 5e-2)])
def test_dtypes(kv_dtype: str, error: float) -> None:
    """Errors are of the whole, ||got - expected|| / ||expected||: a value of float8_e4m3fn is off by up to 1/16."""
    rows, page_size = ((1, 130), (9, 40), (0, 0), (3, 3)), 128
    step = rounded(make_step(rows, Heads(4, 2, 64), page_size=page_size, num_tokens=16), jnp.bfloat16)

    def bind(spec: Any) -> PallasTpuAttention:
        return bind_wide(dataclasses.replace(spec, kv_dtype=kv_dtype))

    got, want = run(bind, step, jnp.bfloat16), expected(step)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < error
    assert np.all(got[~step.is_live] == 0)


@pytest.mark.parametrize("max_slots", [2, 32])  # fewer and more than there are items
@pytest.mark.parametrize("decode_q_len", [1, 4, None])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_write_changes_the_new_slots_of_one_layer_only(
    max_slots: int, decode_q_len: int | None, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_write, "_MAX_SLOTS", max_slots)
    page_size, layers = 8, 3
    several = [(4, 9), (0, 0), (2, 8), (3, 17), (1, 1)] if decode_q_len else [(3, 9), (0, 0), (1, 4), (17, 20)]
    rows = [(0, 0), (1, 9), (1, 8), (0, 0), (1, 1)] if decode_q_len == 1 else several
    step = make_step(rows, Heads(4, 2, 16), page_size=page_size, num_tokens=24, decode_q_len=decode_q_len)
    backend = bind_small(spec_of(step, jnp.float32, kv_dtype=kv_dtype))
    empty = nan_pool(backend, layers * step.num_pages)
    arguments = step.plan_arguments()
    new = [jnp.asarray(x) for x in (step.q, step.new(step.keys), step.new(step.values))]

    @jax.jit
    def write(cache: Any) -> Any:
        metadata = backend.plan(AttentionMetadata(**arguments, decode_q_len=decode_q_len))
        return backend.rope_and_write(pack_qkv(*new), None, cache, metadata, jnp.int32(step.num_pages))[1]

    changed = np.zeros((layers * step.num_pages, page_size), bool)
    slots = (np.asarray(arguments[name])[step.is_live] for name in ("slot_pages", "slot_offsets"))
    pages, offsets = slots
    changed[pages + step.num_pages, offsets] = True
    for got, was in zip(jax.tree.leaves(write(empty)), jax.tree.leaves(empty), strict=True):
        same = np.asarray(got).view(np.uint8) == np.asarray(was).view(np.uint8)
        slot_axis = got.shape.index(page_size)
        per_slot = np.moveaxis(same.reshape(*got.shape, -1), slot_axis, 1).reshape(*changed.shape, -1)
        np.testing.assert_array_equal(~per_slot.all(axis=2), changed)


@pytest.mark.matrix
def test_a_layer_in_the_middle_of_the_pool() -> None:
    step = make_step(MIXED, Heads(2, 1, 16), num_tokens=32)
    got = run(bind_small, step, num_layers=3, layer=1)
    np.testing.assert_allclose(got, expected(step), atol=F32_ERROR, rtol=0)
