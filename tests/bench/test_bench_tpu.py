"""The TPU kernels under `jaxserve bench kernels`: what is tried, and the timing loop around interpreted kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.bench import kernels
from jaxserve.bench.inputs import AttentionCase, make_inputs
from jaxserve.bench.shapes import Shape
from jaxserve.bench.timing import Plan
from jaxserve.bench.tpu import TpuKernels
from jaxserve.cli.main import run
from jaxserve.kernels import tuning
from jaxserve.kernels.pallas.tpu.backend import PallasTpuAttention
from jaxserve.kernels.pallas.tpu.tuning import CHIPS, PassConfig, choose_config, pass_shapes, problem_of
from jaxserve.kernels.spec import Chip

V6E = Chip("tpu", "TPU v6 lite")
SHAPE = Shape(page_size=PallasTpuAttention.default_page_size)
INTERPRETED = TpuKernels(V6E, pltpu.InterpretParams(out_of_bounds_reads="raise", uninitialized_memory="nan"), Plan(1.0, 1, 2))
CONFIGS = {"decode": PassConfig(2, 1, 16, 8, 1, False), "extend": PassConfig(16, 8, 16, 8, 1, True)}


@pytest.fixture
def fast_compile() -> Iterator[None]:
    """Most of an interpreted test is XLA compiling the interpreter's program, which then runs once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def case_of(op: str, kv_dtype: str = "float32", head_dim: int = 16, window: int | None = None) -> AttentionCase:
    rows = ((1, 9), (1, 20)) if op == "decode" else ((9, 12), (3, 3))
    return AttentionCase(rows, 2, 1, head_dim, head_dim, 8, "float32", kv_dtype, window)


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 1, 128), (32, 32, 64)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_what_is_tried_can_run_and_is_near_the_models_choice(kind: str, heads: tuple[int, int, int], kv_dtype: str) -> None:
    shape = Shape(*heads, page_size=128, kv_dtype=kv_dtype)
    here = TpuKernels(Chip("tpu", kind))
    assert here.unsupported(shape) is None
    model = choose_config(shape.spec(here.chip))
    for op, default, pass_shape in zip(
        shape.steps(), (model.decode, model.extend), pass_shapes(shape.spec(here.chip)), strict=True
    ):
        assert here.default_config(op, shape) == default
        others = list(here.others(op, shape, default))
        assert 5 <= len(others) <= 40 and len({*others, default}) == len(others) + 1
        for config in others:
            assert problem_of(pass_shape, config) is None
            assert sum(getattr(config, name) != getattr(default, name) for name in here.tunable(op)) <= 2


def test_what_a_chip_cannot_do_has_a_reason() -> None:
    assert "device kind must be one of" in (TpuKernels(Chip("tpu", "TPU v4")).unsupported(SHAPE) or "")
    assert "page_size must be 128 or 256" in (TpuKernels(V6E).unsupported(Shape(kv_dtype="int8")) or "")


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_the_timing_loop_runs_the_kernels(op: str) -> None:
    assert INTERPRETED.time_case(op, case_of(op), CONFIGS[op]) > 0


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize(("op", "kv_dtype", "window"), [("decode", "int8", None), ("extend", "float32", 4)])
def test_a_call_attends_over_the_cases_own_pages(op: str, kv_dtype: str, window: int | None) -> None:
    """By definition, for the second copy of the pages; a row of 16 + 16 numbers stands in 128 lanes."""
    case = case_of(op, kv_dtype, window=window)
    inputs = make_inputs(case, calls=2, row_dim=128)
    runnable = INTERPRETED.runnable(op, case, inputs, CONFIGS[op])
    got = np.asarray(runnable.call(jnp.int32(1), runnable.carry, runnable.operands))
    pool = np.asarray(inputs.pool, np.float64)[:, 0]
    scales = None if inputs.scales is None else np.asarray(inputs.scales, np.float64)[:, 0]
    token = 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        at = np.arange(kv_len)
        page, slot = np.asarray(inputs.page_table)[row, at // 8] + case.num_pages, at % 8
        k, v = pool[page, slot, :16], pool[page, slot, 16:32]
        if scales is not None:
            k, v = k * scales[page, 0, slot, None], v * scales[page, 1, slot, None]
        for position in range(kv_len - q_len, kv_len):
            scores = np.asarray(inputs.q, np.float64)[token] @ k.T * case.scale
            scores[:, (at > position) | (at <= position - (window or kv_len))] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            np.testing.assert_allclose(got[token], weights @ v / weights.sum(axis=1, keepdims=True), atol=1e-5)
            token += 1


class FakeTimes(TpuKernels):
    def time_case(self, op: str, case: AttentionCase, config: PassConfig) -> float:
        return 100.0 - 20 * (op == "decode" and config.kv_block_tokens == 2048 and config.block_tokens == 16)


def test_the_table_that_tuning_writes_is_what_a_server_runs_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernels_here", lambda: FakeTimes(V6E))
    out = tmp_path / "t.json"
    assert run(["bench", "kernels", "--tune", "--out", str(out)]) == 0
    assert (
        "decode 32/8 heads, D 128/128, pages of 128, bfloat16  kv_block_tokens=2048: 80.0 80.0 80.0" in capsys.readouterr().out
    )
    table = json.loads(out.read_text())
    assert table.keys() == {"cpu"} and table["cpu"].keys() == {SHAPE.key("decode")}  # the test's device; the times are made up
    out.write_text(json.dumps({V6E.kind: table["cpu"]}))
    before = PallasTpuAttention(SHAPE.spec(V6E)).config
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, str(out))
    tuned = PallasTpuAttention(SHAPE.spec(V6E)).config
    assert tuned.decode.kv_block_tokens == 2048 != before.decode.kv_block_tokens
    assert tuned.extend == before.extend
