"""The tuner with made-up times, the shapes it is asked for, and its command where there is no accelerator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.bench import gpu, kernels
from jaxserve.bench.gpu import GpuKernels
from jaxserve.bench.inputs import AttentionCase, decode_case, make_inputs
from jaxserve.bench.kernels import Measured
from jaxserve.bench.shapes import Shape
from jaxserve.bench.timing import COLD_BYTES, Plan, compile_calls, copies_needed
from jaxserve.cli.main import run
from jaxserve.kernels.spec import Chip
from jaxserve.models import DenseMLPSpec, LayerSpec, ModelConfig, SelfAttentionSpec


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    """Has the fields of both grids."""

    streams: int = 2
    stages: int = 2
    block_kv: int = 64
    min_tiles: int = 2
    num_stages: int = 2
    max_heads_per_tile: int = 16

    def problem(self, *sizes: int) -> str | None:
        return "streams must be 2" if self.streams == 1 else None


H200 = Chip("gpu", "NVIDIA H200", (9, 0), 132)


class FakeKernels(GpuKernels):
    """The GPU's grids over made-up times; heads of 64 are not supported."""

    def unsupported(self, shape: Shape) -> str | None:
        return "head_dim is 64." if shape.head_dim == 64 else None

    def default_config(self, op: str, shape: Shape) -> FakeConfig:
        return FakeConfig()

    def time_case(self, op: str, case: AttentionCase, config: FakeConfig) -> float:
        if config.stages == 4:
            raise ValueError("too much shared memory")
        return 100.0 - 10 * (config.block_kv == 128 and op == "decode") + 0.5 * (config.num_stages - 2)


def tuned(tune: bool = True) -> list[Measured]:
    return list(kernels.measure(FakeKernels(H200), [Shape()], tune=tune))


# All that can be tuned, so that it stays what was measured when the kernel's own config changes.
TABLE_ENTRY = {"streams": 2, "stages": 2, "block_kv": 128, "min_tiles": 2}


def test_the_fastest_config_that_runs_is_kept() -> None:
    measured = tuned()
    assert [one.op for one in measured if not one.changes] == ["decode", "extend"]  # the defaults are measured too
    assert any("too much shared memory" in one.reason for one in measured)
    assert not any("streams" in one.changes for one in measured)  # what can not run is not tried
    table = kernels.best_table("GPU", measured)
    # Extend's differences are noise: nothing is written for it.
    assert table == {"GPU": {Shape().key("decode"): TABLE_ENTRY}}


def test_without_tune_only_defaults_run() -> None:
    assert [(one.op, dict(one.changes)) for one in tuned(tune=False)] == [("decode", {}), ("extend", {})]


def test_a_shape_that_is_not_supported_is_listed_with_the_reason() -> None:
    measured = list(kernels.measure(FakeKernels(H200), [Shape(head_dim=64), Shape()], tune=False))
    assert [one.reason for one in measured] == ["head_dim is 64."] * 2 + [""] * 2


def test_where_nothing_runs_the_table_is_empty() -> None:
    assert kernels.best_table("GPU", [Measured("decode", "k", {}, (), "why")]) == {"GPU": {}}


def test_layers_with_and_without_a_window_are_tuned_together() -> None:
    """The windowed ones take a tenth of the time, and what is best for them alone is not best."""
    times = {"a": ({}, 100.0, 10.0), "b": ({"block_kv": 128}, 50.0, 11.0), "c": ({"block_kv": 256}, 200.0, 5.0)}
    failing = [Measured("decode", "k", {"stages": 4}, (1.0,)), Measured("decode", "k", {"stages": 4}, (), "does not fit")]
    measured = [
        Measured("decode", "k", changes, (us[window],), fields={"all": 1, **changes})
        for window in (0, 1)
        for changes, *us in times.values()
    ]
    assert kernels.best_table("GPU", [*measured, *failing]) == {"GPU": {"k": {"all": 1, "block_kv": 128}}}


def test_the_grids_name_fields_of_the_configs() -> None:
    here = GpuKernels(H200)
    for op, grid in gpu.GRIDS.items():
        default = here.default_config(op, Shape())
        assert all(type(getattr(default, name)) is int for name in grid)
        others = list(here.others(op, Shape(), default))
        assert len(set(others)) == len(others) and default not in others


def test_shapes_of_a_model() -> None:
    heads = SelfAttentionSpec(num_heads=16, num_kv_heads=4, head_dim=64, scale=0.125)
    layers = tuple(
        LayerSpec(mixer=dataclasses.replace(heads, window=window), mlp=DenseMLPSpec(intermediate_size=8))
        for window in (None, 32, None)
    )
    config = ModelConfig(
        architecture="x", vocab_size=8, hidden_size=8, max_position_embeddings=64, layers=layers, dtype="bfloat16"
    )
    shapes = Shape.of_model(config, FakeKernels(H200), tp_size=2, page_size=16, kv_dtype="auto")
    assert shapes == [Shape(8, 2, 64, 16, "bfloat16", "bfloat16", window) for window in (None, 32)]
    decode = shapes[1].steps()["decode"][0]
    assert (decode.num_heads, decode.head_dim_v, decode.sliding_window) == (8, 64, 32)


def test_bytes_and_operations_of_a_case() -> None:
    case = decode_case(2, 100, num_heads=4, num_kv_heads=2, head_dim=8, head_dim_v=8)
    assert case.kv_bytes == 2 * 100 * 2 * 16 * 2
    assert case.nbytes == case.kv_bytes + 2 * 4 * 16 * 2
    assert case.flop == 2 * 2 * 100 * 4 * 16
    window = dataclasses.replace(case, sliding_window=30)
    assert (window.kv_bytes, window.flop) == (case.kv_bytes * 3 // 10, case.flop * 3 // 10)
    quantized = dataclasses.replace(case, kv_dtype="int8")
    assert quantized.kv_bytes == 2 * 100 * 2 * (16 + 8)
    prompt = dataclasses.replace(case, rows=((4, 6),))
    assert prompt.flop == 2 * (3 + 4 + 5 + 6) * 4 * 16
    text = dataclasses.replace(case, rows=((4, 4),), is_causal=False)
    assert text.flop == 2 * 4 * 4 * 4 * 16
    assert dataclasses.replace(text, sliding_window=2).flop == 2 * (2 + 3 + 3 + 2) * 4 * 16
    latent = dataclasses.replace(case, value_in_key=True, head_dim=12)
    assert latent.kv_bytes == 2 * 100 * 2 * 12 * 2


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_inputs_rotate_among_copies(kv_dtype: str) -> None:
    case = AttentionCase(((1, 5), (1, 9)), 4, 2, 8, 8, page_size=4, dtype="float32", kv_dtype=kv_dtype)
    inputs = make_inputs(case, calls=3)
    assert [int(inputs.rotation.offset(jnp.int32(index))) for index in range(4)] == [0, 5, 10, 0]
    assert inputs.pool.shape[0] >= 15
    assert (inputs.scales is None) == (kv_dtype == "float32")
    pages = [*inputs.page_table[0, :2].tolist(), *inputs.page_table[1, :3].tolist()]
    assert sorted(pages) == list(range(5))


def test_enough_copies_for_a_cold_cache() -> None:
    assert copies_needed(COLD_BYTES) == 1
    for nbytes in (1, 1 << 20, COLD_BYTES - 1):
        assert (copies_needed(nbytes) - 1) * nbytes >= COLD_BYTES or nbytes == 1


def test_a_loop_is_timed_and_its_calls_are_all_made() -> None:
    def call(index: Any, total: Any, steps: Any) -> Any:
        return total + steps[index]

    timing, total = compile_calls(call, jnp.zeros(()), jnp.arange(4.0), 4, Plan(repeats=2)).time()
    assert float(total) == 6 * (1 + 2 * (1 + 4))  # once to warm up, then twice alone and four times in a row
    assert timing.us_alone > 0 and timing.us_min <= timing.us <= timing.us_max


def test_calls_in_a_loop() -> None:
    plan = Plan(loop_us=1000, most_calls=64)
    assert [plan.calls(us) for us in (1e-9, 10, 100, 400, 1e9)] == [64, 64, 10, 2, 2]


def test_without_an_accelerator_the_command_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for more in ([], ["--tune", "--out", str(tmp_path / "t.json")]):
        assert run(["bench", "kernels", *more]) == 1
        reason = "they are for NVIDIA GPUs and for TPUs, and JAX finds a cpu here."
        assert capsys.readouterr().err.strip() == f"jaxserve: error: The attention kernels cannot run here: {reason}"
    assert not (tmp_path / "t.json").exists()


def test_the_command_writes_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernels_here", lambda: FakeKernels(H200))
    out = tmp_path / "t.json"
    assert run(["bench", "kernels", "--tune", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"cpu": {Shape().key("decode"): TABLE_ENTRY}}
    assert f"JAXSERVE_TUNING_FILE={out}" in capsys.readouterr().out
    assert run(["bench", "kernels", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["device"] == "cpu"


def test_the_command_says_why_no_shape_can_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernels_here", lambda: GpuKernels(dataclasses.replace(H200, compute_capability=(8, 0))))
    assert run(["bench", "kernels"]) == 1
    assert "cannot run here: NVIDIA H200 has compute capability 8.0" in capsys.readouterr().err
