"""Plans of pipelines: what each stage has to do and holds, how a step goes through them, and what is said of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shapes import TINY, TINY_LATENT, config_of, cpu_target

from jaxserve.aot import planner
from jaxserve.aot.capacity_plan import CapacityPlan, PlanOptions
from jaxserve.aot.chips import TPU7X, V6E
from jaxserve.aot.hand_over import are_neighbours, hand_over_bytes_per_s, links_out
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.pipeline_roofline import PipelinePrediction, joined
from jaxserve.aot.planner import plan_capacity
from jaxserve.aot.report import plan_json, plan_text
from jaxserve.aot.roofline import ModelShard, Prediction, StepShape, step_work
from jaxserve.aot.shard_collectives import expected_in_stage, expected_with_shards
from jaxserve.aot.targets import Target, parse_target
from jaxserve.config import ServerArgs
from jaxserve.models import ModelConfig, divide_layers

DEEP = {**TINY, "num_hidden_layers": 5}
SMALL = {"max_running_requests": 4, "decode_row_buckets": (2, 4), "prefill_token_buckets": (64,), "chunked_prefill_size": 64}


@pytest.fixture(autouse=True)
def _keep_jax_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "without_devices", lambda: None)


def stages_of(config: ModelConfig, pp_size: int) -> list[ModelConfig]:
    return [config.replace(stage=stage) for stage in divide_layers(config.num_layers, pp_size)]


def plan(
    folder: Path, raw: dict[str, Any] = DEEP, hbm_bytes: int = 1 << 30, compile: str = "none", **options: Any
) -> CapacityPlan:
    args = ServerArgs(model_path=str(folder), **{**SMALL, "pp_size": 2, **options})
    target = cpu_target(args.num_devices, hbm_bytes)
    made = PlanOptions(compile, assumed_context=32, show_progress=False)
    return plan_capacity(args, config_of(folder, DEEP), target, made)


# --- what a stage has to do


@pytest.mark.parametrize("raw", [DEEP, {**TINY_LATENT, "num_hidden_layers": 5, "first_k_dense_replace": 1}])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_stages_do_together_what_the_model_does(raw: dict[str, Any], tp_size: int, tmp_path: Path) -> None:
    config, shape = config_of(tmp_path, raw), StepShape(3, 2, 20)
    whole, *stages = (step_work(ModelShard(part, "bfloat16", tp_size, 64), shape) for part in (config, *stages_of(config, 3)))
    for field in dataclasses.fields(whole):
        if field.name != "handed_on_bytes":
            total = sum(getattr(stage, field.name) for stage in stages)
            assert total == pytest.approx(getattr(whole, field.name), abs=3), field.name  # rounded bytes of experts
    assert [stage.handed_on_bytes for stage in stages] == [3 * 2 * 32 * 2] * 2 + [0] and whole.handed_on_bytes == 0
    assert [stage.logits_bytes for stage in stages] == [0, 0, whole.logits_bytes]


def test_a_tied_table_is_in_both_ends(tmp_path: Path) -> None:
    """The first stage looks rows up in it, the last one reads it whole."""
    config, table = config_of(tmp_path, {**DEEP, "tie_word_embeddings": True}), 100 * 32 * 2
    whole, first, last = (ModelShard(part, "bfloat16", 1, 64) for part in (config, *stages_of(config, 2)))
    assert first.weight_bytes + last.weight_bytes == whole.weight_bytes + table
    works = [step_work(shard, StepShape(3, 1, 8)) for shard in (whole, first, last)]
    assert works[1].weight_bytes == first.weight_bytes - table + 3 * 32 * 2
    assert works[2].weight_bytes == last.weight_bytes
    assert works[1].matmul_flops + works[2].matmul_flops == works[0].matmul_flops


def test_collectives_of_stages_are_those_of_the_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, DEEP)
    assert [expected_in_stage(stage, 2) for stage in stages_of(config, 2)] == [
        {"all-reduce": 7},
        {"all-reduce": 4, "all-gather": 1},
    ]
    assert expected_in_stage(config, 2) == expected_collectives(config, 2) and expected_in_stage(config, 1) == {}
    for attn_dp_size, packs in ((4, False), (4, True), (2, False), (2, True)):
        divided = config.replace(attn_dp_size=attn_dp_size)
        total: dict[str, int] = {}
        for stage in stages_of(divided, 3):
            for name, count in expected_in_stage(stage, 4, packs_tokens=packs).items():
                total[name] = total.get(name, 0) + count
        assert total == expected_with_shards(divided, 4, packs_tokens=packs)


# --- how a step goes through them


def test_times_of_a_pipeline_by_hand() -> None:
    stages = (Prediction(3, 1, 0), Prediction(2, 5, 1))
    full = PipelinePrediction(stages, (0.5,), steps_at_once=2)
    assert (full.slowest, full.bound, full.latency_s, full.interval_s) == (1, "compute", 9.5, 6)
    assert dataclasses.replace(full, steps_at_once=1).interval_s == 9.5, "each waits for itself"
    assert dataclasses.replace(full, steps_at_once=None).interval_s == 6
    even = PipelinePrediction((Prediction(3, 1, 0),) * 2, (0.5,), steps_at_once=2)
    assert even.interval_s == 6.5 / 2, "two steps cannot hide what is between"
    alone = PipelinePrediction(stages[:1], (), steps_at_once=1)
    assert alone.interval_s == alone.latency_s == 3


def test_the_same_devices_as_one_stage(tmp_path: Path) -> None:
    config = config_of(tmp_path, DEEP)  # two KV heads
    shards = [ModelShard(stage, "bfloat16", 2, 100) for stage in stages_of(config, 2)]
    whole = joined(shards)
    assert whole is not None and (whole.tp_size, whole.config, whole.kv_token_bytes) == (4, config, 100)
    assert joined([dataclasses.replace(shard, tp_size=1) for shard in shards]).kv_token_bytes == 50  # type: ignore[union-attr]
    assert joined([dataclasses.replace(shard, tp_size=4) for shard in shards]) is None, "4 heads"


def devices(chips: list[tuple[int, ...]], process_index: int = 0) -> list[Any]:
    return [SimpleNamespace(coords=(*place, 0)[:3], process_index=process_index) for place in chips]


def test_blocks_of_a_torus() -> None:
    target, left, right = Target(V6E, (2, 4)), [(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 2), (1, 2), (0, 3), (1, 3)]
    assert links_out(target, devices(left)) == links_out(target, devices(right)) == 2
    assert hand_over_bytes_per_s(target, devices(left), devices(right)) == 2 * 100e9 / 4
    assert are_neighbours(target, devices(left)) and not are_neighbours(target, devices([(0, 0), (1, 0), (0, 2), (1, 2)]))
    torus = Target(V6E, (16, 16))
    row = [(x, 0) for x in range(16)]
    assert links_out(torus, devices(row)) == 2 * 16 and are_neighbours(torus, devices([(0, 0), (15, 0)]))
    halves = Target(TPU7X, (2, 2, 1))  # a stage on each half of a chip
    assert hand_over_bytes_per_s(halves, devices([(0, 0)]), devices([(0, 0)])) == 2 * 100e9 + 600e9


def test_switch_and_network() -> None:
    def gpus(host: int) -> list[Any]:
        return [SimpleNamespace(process_index=host)] * 8

    target = parse_target("h200:2x8")
    assert (target.num_devices, target.num_hosts) == (16, 2)
    assert hand_over_bytes_per_s(target, gpus(0), gpus(0)) == 450e9
    assert hand_over_bytes_per_s(target, gpus(0), gpus(1)) == 50e9
    assert are_neighbours(target, gpus(0))


# --- the plan


def test_a_plan_of_two_stages(tmp_path: Path) -> None:
    made = plan(tmp_path, compile="largest", tp_size=2)
    assert made.failure is None and [list(stage.config.own_layers) for stage in made.stages] == [[0, 1, 2], [3, 4]]
    assert len({stage.memory.num_pages for stage in made.stages}) == 1
    for step in made.steps:
        if step.programs:
            for stage, program in zip(made.stages, step.programs, strict=True):
                assert program.collectives == expected_in_stage(stage.config, 2)
                assert program.aliased_bytes >= stage.memory.kv_pool
    assert [[program.name for program in stage.others] for stage in made.stages] == [[], ["sample everything R=4", "score 128"]]
    decode = {step.bucket.name: step.prediction for step in made.steps if step.bucket.decode_only}
    assert {name: step.steps_at_once for name, step in decode.items()} == {"decode R=2": 2, "decode R=4": 1}
    text = plan_text(made)
    assert "--pp-size 2, --tp-size 2" in text and "stage 1 of 2 (layers 0-2)" in text and "--tp-size 4" in text
    found = json.loads(json.dumps(plan_json(made)))
    assert [stage["layers"] for stage in found["stages"]] == [[0, 2], [3, 4]]
    (step,) = (step for step in found["steps"] if step["name"] == "decode R=2")
    pipeline = step["pipeline"]
    assert step["roofline"] == step["stages"][pipeline["slowest_stage"]]["roofline"]
    assert pipeline["tokens_per_s"] == 2 / pipeline["interval_s"] and pipeline["undivided_tokens_per_s"] > 0
    assert pipeline["latency_s"] > sum(stage["roofline"]["step_s"] for stage in step["stages"])


def test_the_fullest_stage_decides(tmp_path: Path) -> None:
    room = {"hbm_bytes": 2_000_000, "max_running_requests": 64, "decode_row_buckets": (64,), "attention_backend": "reference"}
    even, uneven = plan(tmp_path, **room), plan(tmp_path, pp_layer_partition=(4, 1), **room)
    assert even.memory is not None and uneven.memory is not None
    assert uneven.decides == 0 and uneven.kv_tokens < even.kv_tokens
    first, last = uneven.stages
    assert first.memory.num_pages == last.memory.num_pages and first.memory.kv_pool == 4 * last.memory.kv_pool
    assert "stage 1 of 2 (layers 0-3) decides how many" in plan_text(uneven)


def test_an_undivided_model_is_one_stage(tmp_path: Path) -> None:
    made = plan(tmp_path, pp_size=1)
    (stage,) = made.stages
    assert stage.config.stage is None and stage.memory is made.memory
    for step in made.steps:
        assert step.prediction.interval_s == step.prediction.latency_s == step.prediction.stages[0].step_s
        assert step.undivided_tokens_per_s is None
    assert "stage" not in plan_text(made)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp_size": 2}, "--pp-size 2 with --tp-size 2 needs 4 devices; pretended:2 has 2"),
        ({"pp_size": 6, "tp_size": 1}, "--pp-size 6 with --tp-size 1 needs 6 devices; pretended:2 has 2"),
        ({"pp_layer_partition": (1, 1)}, "--pp-layer-partition 1,1 has 2 layers; the model has 5"),
    ],
)
def test_what_was_asked_wrongly(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    args = ServerArgs(model_path=str(tmp_path), **{"pp_size": 2, **options})
    with pytest.raises(ValueError, match=reason):
        plan_capacity(args, config_of(tmp_path, DEEP), cpu_target(2, 1 << 30), PlanOptions("none"))


def test_no_room_in_a_stage(tmp_path: Path) -> None:
    made = plan(tmp_path, hbm_bytes=250_000)
    assert made.failure is not None and made.failure.startswith("Of stage 1 of 2 (layers 0-2): No memory is left for the KV")
