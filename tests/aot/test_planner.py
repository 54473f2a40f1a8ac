"""A whole plan, with this machine's CPU in place of a chip: its compiler is always there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from shapes import TINY, TINY_LATENT, config_of, cpu_target

from jaxserve.aot import planner
from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions
from jaxserve.aot.planner import plan_capacity
from jaxserve.aot.report import plan_json, plan_text, table
from jaxserve.config import ServerArgs
from jaxserve.executor import pooling
from jaxserve.executor.sampler import SamplingMode
from jaxserve.executor.scoring import LINE_COUNTS

OPTIONS = PlanOptions(show_progress=False)
SMALL = {"max_running_requests": 4, "decode_row_buckets": (2, 4), "prefill_token_buckets": (16, 64), "chunked_prefill_size": 64}


@pytest.fixture(autouse=True)
def _keep_jax_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "without_devices", lambda: None)


def plan(folder: Path, hbm_bytes: int = 1 << 30, tp_size: int = 1, compile: str = "none", **changes: Any) -> CapacityPlan:
    config = config_of(folder, TINY)
    args = ServerArgs(model_path=str(folder), tp_size=tp_size, **{**SMALL, **changes})
    options = dataclasses.replace(OPTIONS, compile=compile, assumed_context=32)
    return plan_capacity(args, config, cpu_target(tp_size, hbm_bytes), options)


def test_every_program_of_a_server_is_compiled(tmp_path: Path) -> None:
    made = plan(tmp_path, compile="all", tp_size=2, decode_row_buckets=(4,), prefill_token_buckets=(64,))
    assert made.failure is None and made.memory is not None
    buckets = [step.bucket.name for step in made.steps]
    assert buckets == ["extend T=64 R=4", "decode R=4"]
    names = [program.name for program in made.others]
    assert len(names) == len(SamplingMode) + len(LINE_COUNTS) + len(pooling.LINE_COUNTS) + 5
    assert {"sample greedy R=4", "sample everything R=4", "page table", "row tables", "input embeds", "kv pool"} <= set(names)
    for step in made.steps:
        (program,) = step.programs
        assert program.error is None and program.compile_s > 0
        assert program.argument_bytes >= made.memory.weights + made.memory.kv_pool
        assert program.aliased_bytes >= made.memory.kv_pool
    assert made.memory.free > 0
    text = plan_text(made)
    assert "decode R=4" in text and "Other programs" in text and f"{made.kv_tokens} tokens" in text
    found = json.loads(json.dumps(plan_json(made)))
    assert found["fits"] and found["kv_cache"]["tokens"] == made.kv_tokens
    assert found["steps"][0]["compiled"]["collectives"] == {"all-reduce": 5, "all-gather": 1}


def test_the_pool_is_what_a_server_would_take(tmp_path: Path) -> None:
    made = plan(tmp_path, hbm_bytes=1 << 30)
    assert made.memory is not None and made.args.page_size is not None
    assert made.memory.fitting_pages * made.memory.page_bytes[0] == pytest.approx(0.5 * (1 << 30), rel=0.001)
    assert made.memory.num_pages == (2 * 4 * 64 // made.args.page_size,)
    assert made.kv_tokens == 2 * 4 * 64 and made.full_requests == 8
    assert "there is room for" in plan_text(made)


def test_a_plan_of_a_model_with_windows(tmp_path: Path) -> None:
    """A window takes its share; a request of full length needs only its last tokens there."""
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    config = config_of(tmp_path, {**TINY, **qwen, **layers})
    args = ServerArgs(model_path=str(tmp_path), page_size=4, **SMALL)
    made = plan_capacity(args, config, cpu_target(1, 1 << 30), dataclasses.replace(OPTIONS, compile="none"))
    assert made.failure is None and made.memory is not None
    window_tokens = 2 * 4 * 64 // 2  # --swa-full-tokens-ratio
    assert made.memory.num_pages == (2 * 4 * 64 // 4, window_tokens // 4)
    assert made.kv_tokens == 2 * 4 * 64 and made.full_requests == 8
    kv = json.loads(json.dumps(plan_json(made)))["kv_cache"]
    assert kv["groups"] == [{"num_pages": 128, "window": None}, {"num_pages": window_tokens // 4, "window": 8}]
    assert made.steps[-1].shape.context_len == 64  # all rows at full length
    assert "16 requests, the last 8 of each" in plan_text(made)


def test_int8_weights_are_counted_as_the_compiler_counts_them(tmp_path: Path) -> None:
    plain, made = plan(tmp_path, dtype="bfloat16"), plan(tmp_path, dtype="bfloat16", quantization="int8wo", compile="largest")
    assert plain.memory is not None and made.memory is not None and made.failure is None
    assert made.memory.weights < 0.75 * plain.memory.weights  # the embedding and norms stay
    assert made.config.quantization == "int8wo"
    (program,) = made.steps[-1].programs
    tables = made.memory.row_tables + made.memory.page_table + made.memory.hidden
    assert program.argument_bytes < made.memory.weights + made.memory.kv_pool + tables


def test_a_pool_that_leaves_no_room_is_cut(tmp_path: Path) -> None:
    """With all memory promised to weights and cache, the steps' temporaries are measured and taken off."""
    promised, cut = (
        plan(tmp_path, 550_000, mem_fraction_static=1.0, compile=compile, attention_backend="reference")
        for compile in ("none", "largest")
    )
    assert cut.failure is None and cut.memory is not None and promised.memory is not None
    assert cut.memory.num_pages < promised.memory.num_pages
    assert 0 <= cut.memory.free < cut.memory.page_bytes[0]


def test_a_pool_that_was_asked_for(tmp_path: Path) -> None:
    assert plan(tmp_path, max_total_tokens=640).kv_tokens == 640
    too_much = plan(tmp_path, max_total_tokens=100_000_000)
    assert too_much.failure is not None and "are missing on each device" in too_much.failure


def test_no_room_for_a_page(tmp_path: Path) -> None:
    made = plan(tmp_path, hbm_bytes=250_000)
    assert made.failure is not None
    assert "No memory is left for the KV cache" in made.failure and "The smallest known slice" in made.failure


def test_weights_that_do_not_fit_are_not_compiled(tmp_path: Path) -> None:
    made = plan(tmp_path, hbm_bytes=20_000)
    assert made.failure is not None and made.failure.startswith("The weights take") and not made.steps
    assert "fits" in plan_json(made) and plan_text(made)


def test_what_was_asked_wrongly(tmp_path: Path) -> None:
    config = config_of(tmp_path, TINY)
    args = ServerArgs(model_path=str(tmp_path), tp_size=8)
    with pytest.raises(ValueError, match="needs as many devices; pretended:4 has 4"):
        plan_capacity(args, config, cpu_target(4, 1 << 30), OPTIONS)
    with pytest.raises(ValueError, match="must divide the model's num_heads=4"):
        plan_capacity(args.replace(tp_size=3), config, cpu_target(4, 1 << 30), OPTIONS)


def test_compiled_programs_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    config = config_of(tmp_path, TINY)
    options = dataclasses.replace(OPTIONS, compile="largest", save_to=out)
    made = plan_capacity(ServerArgs(model_path=str(tmp_path), **SMALL), config, cpu_target(1, 1 << 30), options)
    assert made.failure is None
    written = sorted(file.name for file in out.iterdir())
    assert written == ["decode_R4.xla", "extend_T64_R4.xla", "sample_everything_R4.xla", "score_128.xla"]


def test_notes(tmp_path: Path) -> None:
    config = config_of(tmp_path, TINY)
    made = plan_capacity(
        ServerArgs(model_path=str(tmp_path), tp_size=4, **SMALL),
        config,
        cpu_target(8, 1 << 30),
        dataclasses.replace(OPTIONS, compile="none"),
    )
    text = plan_text(made)
    assert "4 of the 8 devices stay idle" in text
    assert "Each of the 2 KV heads is kept on 2 devices" in text


def test_latents_are_whole_on_each_device(tmp_path: Path) -> None:
    args = ServerArgs(model_path=str(tmp_path), tp_size=2, **SMALL)
    options = dataclasses.replace(OPTIONS, compile="none")
    text = plan_text(plan_capacity(args, config_of(tmp_path, TINY_LATENT), cpu_target(2, 1 << 30), options))
    assert "Each of the 2 devices keeps the latents of all tokens" in text
    assert "KV heads" not in text


def test_columns_are_aligned() -> None:
    assert table(("a", "bb"), [("xyz", "1"), ("x", "333")]) == ["  a     bb", "  xyz    1", "  x    333"]
