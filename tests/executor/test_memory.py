"""The memory budget: which pages fit, and that a server and a plan draw up the same."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest

from benchmarks.model_configs import LLAMA_8B, write_config
from jaxserve.aot import planner
from jaxserve.aot.capacity_plan import PlanOptions
from jaxserve.aot.chips import V6E
from jaxserve.aot.planner import plan_capacity
from jaxserve.aot.targets import Target
from jaxserve.config import ServerArgs
from jaxserve.executor import build, memory
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.memory import (
    GIB,
    DeviceMemory,
    MemoryBudget,
    ProgramMemory,
    StepMemory,
    bytes_for_pools,
    hidden_bytes,
    measure,
    memory_budget,
    memory_lines,
    weight_bytes,
)
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.programs import SamplingKey
from jaxserve.models import ModelConfig

TINY = LLAMA_8B | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MISTRAL = TINY | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
WINDOWS = TINY | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
ARGS = {"max_running_requests": 4, "decode_row_buckets": (4,), "prefill_token_buckets": (16,), "chunked_prefill_size": 16}
TOTAL = 400_000  # so little that the pool is what is left

MakeBlueprint = Callable[..., Blueprint]


@pytest.fixture
def make_blueprint(tmp_path: Path) -> MakeBlueprint:
    def make(model: dict[str, Any] = TINY, **changes: Any) -> Blueprint:
        config = ModelConfig.from_pretrained(write_config(tmp_path, model))
        args = ServerArgs(model_path=str(tmp_path), **(ARGS | changes))
        return Blueprint.draw(args, config, make_mesh(args.tp_size))

    return make


def test_pages_fill_the_share_that_is_left() -> None:
    common = {"mem_fraction": 0.9, "page_bytes": GIB, "page_size": 16}
    device = DeviceMemory(total=100 * GIB, free=80 * GIB)
    assert bytes_for_pools(device, table_bytes=0, step_bytes=GIB, **common) // GIB == 70  # 80 free, 10 of them not ours
    assert bytes_for_pools(device, table_bytes=2 * GIB, step_bytes=GIB, **common) // GIB == 68
    # Steps need more than the reserve.
    assert bytes_for_pools(device, table_bytes=2 * GIB, step_bytes=30 * GIB, **common) // GIB == 48


def test_no_room_is_an_error_with_the_numbers() -> None:
    device = DeviceMemory(total=10 * GIB, free=GIB)
    with pytest.raises(ValueError, match=r"1\.00 GiB are free.*0\.8.*2\.00 GiB.*tables 0\.50.*16 tokens"):
        bytes_for_pools(device, mem_fraction=0.8, table_bytes=GIB // 2, step_bytes=0, page_bytes=GIB, page_size=16)


def test_the_budget_is_the_whole_device(make_blueprint: MakeBlueprint) -> None:
    blueprint = make_blueprint()
    weights = weight_bytes(blueprint)
    assert weights == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(blueprint.abstract_params()))
    steps = StepMemory(temporaries=30_000, code=10_000)
    budget = memory_budget(blueprint, DeviceMemory(TOTAL, TOTAL - weights - 5_000), steps)
    assert (budget.weights, budget.others, budget.temporaries, budget.code) == (weights, 5_000, 30_000, 10_000)
    assert budget.row_tables > 5 * 100 * 2  # output_counts alone, with the row for padding
    assert budget.page_table == 5 * blueprint.spec((1,)).max_pages_per_row * 4
    assert budget.hidden == blueprint.spec((1,)).max_step_tokens * blueprint.config.hidden_size * 4
    reserve = TOTAL - int(TOTAL * blueprint.args.mem_fraction_static) - 40_000
    assert reserve <= budget.free < reserve + 2 * budget.page_bytes[0]
    needy = memory_budget(blueprint, DeviceMemory(TOTAL, TOTAL - weights), StepMemory(TOTAL // 2, 10_000))
    assert needy.num_pages < budget.num_pages and 0 <= needy.free < needy.page_bytes[0]
    table = "\n".join(memory_lines(budget, blueprint))
    assert f"{budget.num_pages[0] * blueprint.page_size} tokens" in table and "row tables" in table


def test_a_pool_that_was_asked_for(make_blueprint: MakeBlueprint) -> None:
    blueprint = make_blueprint(max_total_tokens=64)
    assert memory_budget(blueprint, DeviceMemory(TOTAL, 0), None).num_pages == (64 // blueprint.page_size,)


def test_pools_of_a_model_with_windows(make_blueprint: MakeBlueprint) -> None:
    """Three layers of four see a window: they keep half as many tokens, or what rows can use of them."""
    blueprint = make_blueprint(WINDOWS, page_size=4)
    layer_bytes = 4 * 2 * 2 * 8 * 4  # a page of 4 tokens: keys and values of 2 heads of 8, float32
    assert blueprint.page_bytes == (layer_bytes, 3 * layer_bytes)
    weights = weight_bytes(blueprint)
    few, plenty = (memory_budget(blueprint, DeviceMemory(t, t - weights), None) for t in (560_000, 10_000_000))
    for budget in (few, plenty):
        full, window = budget.kv_groups
        assert (full.window, window.window) == (None, 8)
        assert budget.kv_pool == (full.num_pages + 3 * window.num_pages) * layer_bytes
        assert budget.free >= 0
    assert few.num_pages[1] == max(-(-few.num_pages[0] // 2), (8 + 16 + 8) // 4) and few.fitting_pages == few.num_pages[0]
    assert plenty.num_pages == (2 * 4 * 64 // 4, 4 * 64 // 4)
    assert plenty.fitting_pages > plenty.num_pages[0]
    table = "\n".join(memory_lines(plenty, blueprint))
    assert "8 requests of 64" in table and "all tokens" in table and "512 tokens, 8 requests; there is room for" in table
    assert "  window 8 " in table and "256 tokens, 16 requests, the last 8 of each" in table


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_pools_that_were_asked_for(make_blueprint: MakeBlueprint, ratio: float) -> None:
    blueprint = make_blueprint(WINDOWS, page_size=4, max_total_tokens=128, swa_full_tokens_ratio=ratio)
    budget = memory_budget(blueprint, DeviceMemory(TOTAL, 0), None)
    assert budget.num_pages == (32, 8 if ratio == 0.25 else 32)


def test_the_only_pool_may_be_a_window(make_blueprint: MakeBlueprint) -> None:
    blueprint = make_blueprint(MISTRAL, page_size=4)
    budget = memory_budget(blueprint, DeviceMemory(10_000_000, 10_000_000 - weight_bytes(blueprint)), None)
    assert budget.num_pages == (2 * 4 * 64 // 4,)
    assert "512 tokens, 32 requests of 64, the last 8 of each; there is" in "\n".join(memory_lines(budget, blueprint))
    asked = make_blueprint(MISTRAL, page_size=4, max_total_tokens=400)
    assert memory_budget(asked, DeviceMemory(TOTAL, 0), None).num_pages == (100,)


def test_code_is_that_of_all_programs(make_blueprint: MakeBlueprint) -> None:
    blueprint = make_blueprint(decode_row_buckets=(2, 4))
    known = weight_bytes(blueprint) + 5 * blueprint.spec((1,)).max_pages_per_row * 4 + 10 * blueprint.page_bytes[0]
    known += hidden_bytes(blueprint)
    extend = ProgramMemory(arguments=known + 7, temporaries=100, new_outputs=20, code=5)
    decode = ProgramMemory(arguments=known, temporaries=50, new_outputs=30, code=3)
    sampling = ProgramMemory(arguments=0, temporaries=10, new_outputs=1, code=1)
    scoring = ProgramMemory(arguments=0, temporaries=60, new_outputs=2, code=2)
    steps = StepMemory.of(blueprint, [extend, decode, sampling, scoring], num_pages=(10,))
    assert steps.temporaries == 120 + 30 + 7
    assert steps.code == 5 * len(blueprint.buckets.all) + len(SamplingKey.all_of(blueprint.buckets.all)) + 2 * 2


class ThisCpu(Target):
    def devices(self) -> tuple[Any, ...]:
        return tuple(jax.devices("cpu")[: self.num_devices])


def plan_of(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch, compile: str, total: int, **changes: Any) -> MemoryBudget:
    monkeypatch.setattr(planner, "without_devices", lambda: None)
    chip = dataclasses.replace(V6E, name="pretended", kind="cpu", platform="cpu", hbm_bytes=total)
    args = ServerArgs(model_path=blueprint.args.model_path, **(ARGS | changes))
    options = PlanOptions(compile=compile, show_progress=False)
    plan = plan_capacity(args, blueprint.config, ThisCpu(chip, (1,)), options)
    assert plan.failure is None and plan.memory is not None, plan.failure
    return plan.memory


@pytest.mark.parametrize("changes", [{}, {"max_total_tokens": 64}, {"swa_full_tokens_ratio": 0.3}])
@pytest.mark.parametrize("model", [TINY, WINDOWS], ids=["full", "windows"])
def test_a_server_and_a_plan_draw_up_the_same_budget(
    make_blueprint: MakeBlueprint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    blueprint, total = make_blueprint(model, **changes), 2 * TOTAL
    monkeypatch.setattr(build, "measure", lambda *_: DeviceMemory(total, total - weight_bytes(blueprint)))
    assert (
        plan_of(blueprint, monkeypatch, "none", total, **changes)
        == build.plan_memory([blueprint], tmp_path, weights_loaded=True)[0]
    )


@pytest.mark.parametrize("model", [TINY, WINDOWS], ids=["full", "windows"])
def test_of_several_hosts_the_one_with_the_least_memory_decides(
    make_blueprint: MakeBlueprint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: dict[str, Any]
) -> None:
    blueprint = make_blueprint(model)
    budgets = []
    for total in (3 * TOTAL, 6 * TOTAL // 5):
        monkeypatch.setattr(build, "measure", lambda *_, total=total: DeviceMemory(total, total - weight_bytes(blueprint)))
        budgets.append(build.plan_memory([blueprint], tmp_path, weights_loaded=True)[0])
    large, small = budgets
    assert large.num_pages > small.num_pages
    monkeypatch.setattr(build.distributed, "least", lambda pages: min(pages, small.num_pages[0]))
    assert build.plan_memory([blueprint], tmp_path, weights_loaded=True)[0].num_pages == small.num_pages
    monkeypatch.setattr(build, "measure", lambda *_: DeviceMemory(3 * TOTAL, 3 * TOTAL - weight_bytes(blueprint)))
    agreed = build.plan_memory([blueprint], tmp_path, weights_loaded=True)[0]
    assert (agreed.num_pages, agreed.total) == (small.num_pages, 3 * TOTAL)


def test_a_server_and_a_plan_find_the_same_step_memory(make_blueprint: MakeBlueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan compiles steps with the whole pool, a server with a small one."""
    blueprint, total = make_blueprint(), 10 * TOTAL
    device = DeviceMemory(total, total - weight_bytes(blueprint))
    started = memory_budget(blueprint, device, build.measure_steps(blueprint))
    assert started.temporaries > 0
    assert plan_of(blueprint, monkeypatch, "largest", total) == started


def test_a_busy_host_is_no_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host's memory, what other programs hold is not divided: a server starts where they hold three quarters."""
    host = types.SimpleNamespace(total=1000 * GIB, available=250 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    device = measure(jax.devices("cpu")[0])
    assert device.free == host.available < device.total < 2 * host.available
    half = bytes_for_pools(device, mem_fraction=0.5, table_bytes=0, step_bytes=0, page_bytes=GIB, page_size=16)
    assert device.total // 4 < half < device.total // 2


def test_replicas_share_a_cpu_host(make_blueprint: MakeBlueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together no more than one server, of the free memory and of the limit of pools."""
    device = jax.devices("cpu")[0]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=9 * GIB))
    whole, part = measure(device), measure(device, 3)
    assert (whole.free, part.free) == (9 * GIB, 3 * GIB)
    assert 3 * part.total <= whole.total + GIB // 8
    accelerator = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 8 * GIB, "bytes_in_use": GIB})
    assert measure(accelerator, 3) == measure(accelerator)  # type: ignore[arg-type]
    limit = 4 * sum(make_blueprint().page_bytes)
    monkeypatch.setattr(memory, "CPU_POOL_LIMIT_BYTES", limit)
    pages = [memory_budget(make_blueprint(dp_size=count), whole, None).num_pages[0] for count in (1, 2, 4)]
    assert pages == [4, 2, 1]
    free = TOTAL - weight_bytes(make_blueprint())
    near = [DeviceMemory(TOTAL, free), DeviceMemory(TOTAL, free - 999)]
    monkeypatch.setattr(memory, "CPU_POOL_LIMIT_BYTES", TOTAL * 10)
    found = {memory_budget(make_blueprint(dp_size=2, page_size=1), device, None).num_pages for device in near}
    assert len(found) == 1, "with one pool they share programs"
