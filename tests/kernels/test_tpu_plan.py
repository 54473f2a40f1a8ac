"""What the TPU kernels are told to do, and how their block sizes are chosen; no kernel runs here."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels import tuning
from jaxserve.kernels.metadata import NO_PAGE
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.pallas.tpu.layout import RowLayout, pack_queries, token_of_row, tokens_of_tiles, unpack_tokens
from jaxserve.kernels.pallas.tpu.mla import mla_config
from jaxserve.kernels.pallas.tpu.plan import plan_extend_write, plan_pass, plan_step
from jaxserve.kernels.pallas.tpu.tuning import (
    CHIPS,
    PassConfig,
    PassShape,
    TpuConfig,
    choose_config,
    expanded_config,
    pass_shapes,
    problem_of,
    vmem_bytes,
)
from jaxserve.kernels.spec import AttentionSpec, Chip

BLOCK, T, R = 8, 40, 6
CONFIG = PassConfig(BLOCK, 4, 16, 8, 1, True)
SPEC = AttentionSpec(Chip("tpu", "TPU v6 lite"), 32, 8, 128, "bfloat16", "bfloat16", 128)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=R, max_size=R).filter(lambda lens: sum(lens) <= T))
def test_items_are_the_blocks_and_rows_with_tokens_in_common(q_lens: list[int]) -> None:
    starts = np.cumsum([0, *q_lens[:-1]])
    arrays = (jnp.asarray(x, jnp.int32) for x in (starts, q_lens, np.minimum(q_lens, 1) * 20))
    plan = plan_pass(*arrays, T, CONFIG)
    want = sorted({(token // BLOCK, row) for row in range(R) for token in range(starts[row], starts[row] + q_lens[row])})
    count = int(plan.block_items[-1])
    got = list(zip(np.asarray(plan.item_block)[:count].tolist(), np.asarray(plan.item_row)[:count].tolist(), strict=True))
    assert got == want
    for block in range(plan.num_blocks):
        first, end = plan.block_items[block : block + 2]
        assert [item for item in want if item[0] == block] == want[int(first) : int(end)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(-20, 20)), min_size=R, max_size=R).filter(
        lambda rows: sum(q_len for q_len, _, _ in rows) <= T
    )
)
def test_queries_before_all_keys_are_in_no_item(rows: list[tuple[int, int, int]]) -> None:
    """Rows are (queries, keys, position of the first query)."""
    q_lens, kv_lens, positions = (np.array(x) for x in zip(*rows, strict=True))
    starts = np.cumsum([0, *q_lens[:-1]])
    plan = plan_pass(*(jnp.asarray(x, jnp.int32) for x in (starts, q_lens, kv_lens)), T, CONFIG, jnp.asarray(positions))
    seeing = [
        (starts[row] + i, row)
        for row, (q_len, kv_len, position) in enumerate(rows)
        for i in range(q_len)
        if kv_len > 0 and position + i >= 0
    ]
    want = sorted({(token // BLOCK, row) for token, row in seeing})
    count = int(plan.block_items[-1])
    assert list(zip(plan.item_block[:count].tolist(), plan.item_row[:count].tolist(), strict=True)) == want
    assert plan.position is not None
    for row in {row for _, row in want}:
        first, length = int(plan.q_start[row]), int(plan.q_len[row])
        assert [token for token, its_row in seeing if its_row == row] == list(range(first, first + length))
        assert int(plan.position[row]) == positions[row] + first - starts[row]


def test_rows_of_few_queries_are_decode_rows_of_mixed_steps() -> None:
    q_lens, kv_lens = [2, 1, 5, 0, 4, 3], [9, 7, 5, 0, 20, 3]
    config = TpuConfig(PassConfig(2, 1, 16, 8, 1, False), CONFIG, 4, 4, 64, None)
    arrays = [jnp.asarray(x, jnp.int32) for x in (kv_lens, np.cumsum([0, *q_lens]), np.zeros((R, 4)), [0] * 20, [0] * 20)]
    plan = plan_step(*arrays, decode_q_len=None, page_size=8, config=config)
    assert plan.decode.q_len.tolist() == [2, 1, 0, 0, 4, 3]
    assert plan.extend is not None and plan.extend.q_len.tolist() == [0, 0, 5, 0, 0, 0]
    assert plan.decode.q_start.tolist() == [0, 4, 8, 12, 16, 20]
    assert (plan.decode.config.tile_tokens, plan.decode.config.block_tokens) == (4, 8)
    assert plan.decode_tokens is not None and plan.decode_place is not None
    place = np.asarray(plan.decode_place)
    assert place.tolist() == [0, 1, 4, *[-1] * 5, 16, 17, 18, 19, 20, 21, 22, *[-1] * 5]
    np.testing.assert_array_equal(np.asarray(plan.decode_tokens)[place[place >= 0]], np.flatnonzero(place >= 0))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=R, max_size=R).filter(
        lambda r: sum(q for q, _ in r) <= T
    )
)
def test_every_new_slot_is_in_one_item(rows: list[tuple[int, int]]) -> None:
    """Rows are (new tokens, cached tokens); a row's page p is page 10 * row + p."""
    page_size, group = 8, 4
    slots = [
        (10 * row + p // page_size, p % page_size) for row, (n, cached) in enumerate(rows) for p in range(cached, cached + n)
    ]
    padding = [(NO_PAGE + 5, 3)] * (T - len(slots))
    pages, offsets = (jnp.asarray(x, jnp.int32) for x in zip(*slots, *padding, strict=True))
    plan = plan_extend_write(pages, offsets, jnp.arange(T) < len(slots), R, group)
    count = int(plan.num_items)
    assert count <= plan.page.shape[0]
    got = []
    for page, first, end, token in np.stack([plan.page, plan.first, plan.end, plan.token], axis=1)[:count].tolist():
        assert first == end or first // group == (end - 1) // group
        assert slots[token : token + end - first] == [(page, slot) for slot in range(first, end)]
        got += slots[token : token + end - first]
    assert got == slots


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "value_start", "width", "value_lanes"),
    [
        (16, None, 16, 128, 128),
        (64, None, 64, 128, 128),
        (80, None, 128, 256, 128),
        (128, None, 128, 256, 128),
        (192, None, 192, 384, 256),
        (256, None, 256, 512, 256),
        (48, 32, 48, 128, 128),
        (192, 128, 256, 384, 128),
        (192, 64, 192, 256, 128),
    ],
)
def test_rows_take_as_few_lanes_as_they_can(
    head_dim: int, value_dim: int | None, value_start: int, width: int, value_lanes: int
) -> None:
    layout = RowLayout.of(head_dim, value_dim)
    assert (layout.value_start, layout.width, layout.value_lanes) == (value_start, width, value_lanes)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((3, 2, dim)).astype(np.float32) for dim in (head_dim, value_dim or head_dim))
    rows = np.asarray(layout.rows(jnp.asarray(k), jnp.asarray(v)))
    np.testing.assert_array_equal(rows[..., :head_dim], k)
    np.testing.assert_array_equal(layout.value_of(jnp.asarray(rows[..., layout.first_value_lane :])), v)
    assert np.count_nonzero(rows) == k.size + v.size


@pytest.mark.parametrize(("tile_tokens", "num_tiles", "group"), [(1, 5, 3), (4, 2, 2), (8, 1, 1)])
def test_packed_queries_come_back(tile_tokens: int, num_tiles: int, group: int) -> None:
    q = np.random.default_rng(0).standard_normal((5, 2 * group, 16)).astype(np.float32)
    packed = pack_queries(jnp.asarray(q), 2, tile_tokens, num_tiles, 128)
    unpacked = unpack_tokens(tokens_of_tiles(packed, tile_tokens, group), 5)
    np.testing.assert_array_equal(unpacked[..., :16], q)
    assert token_of_row(tile_tokens, group).shape == (packed.shape[2], 128)


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 1, 256), (32, 32, 128), (3, 3, 64), (128, 8, 128)])
@pytest.mark.parametrize(("page_size", "kv_dtype"), [(16, "bfloat16"), (256, "bfloat16"), (128, "int8")])
def test_chosen_sizes_fit(kind: str, heads: tuple[int, int, int], page_size: int, kv_dtype: str) -> None:
    spec = AttentionSpec(Chip("tpu", kind), *heads, "bfloat16", kv_dtype, page_size)
    assert PallasTpuAttention.supports(spec) is None
    chosen = choose_config(spec)
    for config, shape in zip((chosen.decode, chosen.extend), pass_shapes(spec), strict=True):
        assert problem_of(shape, config) is None
        assert 2 * vmem_bytes(shape, config) <= CHIPS[kind].vmem_bytes


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize("num_heads", [1, 12, 16, 128])
@pytest.mark.parametrize(("page_size", "dtype"), [(16, "bfloat16"), (128, "bfloat16"), (256, "float32")])
def test_groups_of_expanded_heads_fit(kind: str, num_heads: int, page_size: int, dtype: str) -> None:
    layout = RowLayout.of(192, 128)
    chosen = expanded_config(num_heads, layout, page_size, dtype, kind)
    heads = chosen.heads_at_once
    shape = PassShape(layout, heads, heads, page_size, dtype, dtype, is_decode=False)
    assert num_heads % heads == 0 and problem_of(shape, chosen.extend) is None
    assert 2 * vmem_bytes(shape, chosen.extend) <= CHIPS[kind].vmem_bytes
    assert vmem_bytes(shape, chosen.extend) < chosen.vmem_limit_bytes < CHIPS[kind].vmem_bytes


DECODE_KEY = "decode 32/8 heads, D 128/128, pages of 128, bfloat16"


def write_table(path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps({SPEC.chip.kind: {DECODE_KEY: fields}}))
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, str(path))


def test_a_table_goes_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PallasTpuAttention(SPEC).config
    write_table(tmp_path / "t.json", monkeypatch, {"block_tokens": 64, "kv_block_tokens": 8192, "split_masked": True})
    tuned = PallasTpuAttention(SPEC).config
    changes = {"block_tokens": 64, "kv_block_tokens": 8192, "split_masked": True}
    assert tuned.decode == dataclasses.replace(model.decode, **changes)
    assert tuned.extend == model.extend
    assert model.vmem_limit_bytes is not None and tuned.vmem_limit_bytes is not None
    assert tuned.vmem_limit_bytes > model.vmem_limit_bytes  # the larger block's
    for other in ({"page_size": 256}, {"num_heads": 16}, {"kv_dtype": "int8"}, {"chip": Chip("tpu", "TPU v5 lite")}):
        assert choose_config(dataclasses.replace(SPEC, **other)).decode.block_tokens <= 16


def test_latent_attention_has_keys_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {SPEC.chip.kind: {"decode 16/1 heads, D 576/512, pages of 128, bfloat16": {"block_tokens": 32}}}
    (tmp_path / "t.json").write_text(json.dumps(table))
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, str(tmp_path / "t.json"))
    tuned = mla_config(16, RowLayout.latent(512, 64), 128, "bfloat16", "bfloat16", SPEC.chip.kind)
    assert tuned.decode.block_tokens == 32


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_block": 256}, "there is no 'kv_block'; known are block_tokens, "),
        ({"split_masked": 1}, "split_masked must be of type bool; got 1"),
        ({"block_tokens": 0}, "block_tokens must be at least 1; got 0"),
        ({"tile_tokens": 2}, "tile_tokens must be 1 for decode; got 2"),
        ({"kv_chunk_tokens": 64}, "kv_chunk_tokens must be a multiple of 128 and of pages of 128 tokens; got 64"),
        ({"kv_block_tokens": 384, "kv_chunk_tokens": 256}, "kv_block_tokens 384 must be a multiple of kv_chunk_tokens 256"),
        ({"head_unroll": 3}, "head_unroll must divide the 8 KV heads; got 3"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the kernel is bound; `supports` knows nothing of tables, for "auto" would take another backend in silence."""
    path = tmp_path / "t.json"
    write_table(path, monkeypatch, fields)
    assert PallasTpuAttention.supports(SPEC) is None
    with pytest.raises(ValueError, match=re.escape(f"{path}: TPU v6 lite: {DECODE_KEY}: {reason}")):
        _ = PallasTpuAttention(SPEC).config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"chip": Chip("gpu", "NVIDIA H200")}, "runs on TPUs, not on platform 'gpu'"),
        ({"chip": Chip("tpu", "TPU v4")}, "device kind must be one of TPU v5 lite.*got 'TPU v4'"),
        ({"num_heads": 9}, "9 query heads are not a multiple of 8 KV heads"),
        ({"dtype": "float16", "kv_dtype": "float16"}, "dtype must be bfloat16 or float32; got float16"),
        ({"kv_dtype": "float32"}, "kv_dtype must be bfloat16, float8_e4m3fn or int8; got float32"),
        ({"head_dim": 512}, "head_dim must be at most 256; got 512"),
        ({"page_size": 8}, "page_size must be a power of two of 16..256 tokens for bfloat16; got 8"),
        ({"page_size": 96}, "power of two"),
        ({"page_size": 64, "kv_dtype": "int8"}, "page_size must be 128 or 256 for int8"),
        ({"page_size": None, "kv_dtype": "float8_e4m3fn"}, None),
        (
            {"num_heads": 64, "num_kv_heads": 64, "head_dim": 256, "page_size": 256, "chip": Chip("tpu", "TPU7x")},
            "no block size fits 64 MiB of VMEM",
        ),
    ],
    ids=str,
)
def test_reasons(changes: dict[str, Any], reason: str | None) -> None:
    got = PallasTpuAttention.supports(dataclasses.replace(SPEC, **changes))
    assert got is None if reason is None else re.search(reason, got or "")
