"""The stages of a pipeline, compiled from shapes alone: which collectives each has, its cache in place, and that what goes from
one to the next arrives as it lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.model_configs import DEEPSEEK_V3, LLAMA_70B, write_config
from jaxserve.aot.hand_over import are_neighbours, links_out
from jaxserve.aot.shard_collectives import expected_in_stage
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.mesh import make_meshes
from jaxserve.executor.step import HandedOn
from jaxserve.models import DATA_AXIS, ModelConfig
from tests.accelerator.proofs import Facts, Program, Record

pytestmark = pytest.mark.compile

LLAMA = {**LLAMA_70B, "num_hidden_layers": 4}
DEEPSEEK = {**DEEPSEEK_V3, "num_hidden_layers": 6}  # the first three are dense
NUM_PAGES = 16384
Prove = Callable[..., Facts]


def draw(folder: Path, raw: dict[str, Any], topology: str, **options: Any) -> tuple[Blueprint, ...]:
    if topology.startswith("v6e"):
        pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")
    config = ModelConfig.from_pretrained(write_config(folder, raw))
    args = ServerArgs(model_path=str(folder), **options)
    devices = list(parse_target(topology).devices())
    meshes = make_meshes(args.pp_size, args.tp_size, devices, attn_dp_size=args.attn_dp_size)
    stages = Blueprint.draw_stages(args, config, meshes)
    assert [list(stage.mesh.devices.flat) for stage in stages] == [devices[: args.tp_size], devices[args.tp_size :]]
    assert {stage.backend.name for stage in stages} == {"pallas"}
    return stages


def check_step(prove: Prove, stage: Blueprint, bucket: Bucket) -> None:
    facts = prove(stage.lower(bucket, stage.pages_each(NUM_PAGES)))
    expected = dict(expected_in_stage(stage.config, stage.args.tp_size, packs_tokens=bucket.packs_tokens))
    # TPUs gather few rows of logits by adding them up, each device's part in its place.
    added_up = {name: expected.get(name, 0) + more for name, more in (("all-reduce", 1), ("all-gather", -1))}
    allowed = [expected, {name: count for name, count in {**expected, **added_up}.items() if count}]
    assert facts.collectives in allowed[: 1 + stage.config.has_head], (
        f"{bucket.name}: {json.dumps(facts.collectives)}, expected {expected}"
    )
    assert facts.aliased_bytes >= sum(stage.page_bytes) * NUM_PAGES > facts.temp_bytes
    for page in jax.tree.leaves(stage.backend.kv_pages()):
        made = facts.copies_of((len(stage.config.own_layers) * NUM_PAGES, *page.shape))
        assert not [array for array in made if array.opcode.startswith("copy")], bucket  # latents are scattered in a fusion
    assert all(kernel.spill_bytes == 0 and not kernel.warnings for kernel in facts.gpu_kernels), facts.gpu_kernels


@pytest.fixture
def shards_handed_on(record: Record, request: pytest.FixtureRequest) -> Callable[[Blueprint, Any], dict[str, Any]]:
    """What each device of a stage has of the hidden states that it hands on, as compiled: from the record if it holds this very
    program."""

    def read(lowered: Any) -> dict[str, Any]:
        handed_on = lowered.out_info[1]
        sharding = lowered.compile().output_shardings[1].x
        places = sharding.devices_indices_map(handed_on.x.shape)
        shards = [
            [list(part.indices(size)) for part, size in zip(place, handed_on.x.shape, strict=True)] for place in places.values()
        ]
        return {"memory": sharding.memory_kind, "shards": shards}

    def recall(stage: Blueprint, lowered: Any) -> dict[str, Any]:
        key = Program.of(lowered, "handed on").fingerprint
        found: dict[str, Any] = record.recall(request.node.nodeid, key, lambda: read(lowered))
        return found

    return recall


def test_stages_of_llama_on_h200(tmp_path: Path, prove: Prove, shards_handed_on: Any) -> None:
    stages = draw(tmp_path, LLAMA, "h200:8", pp_size=2, tp_size=4)
    check_stages(prove, stages)
    check_hand_over(stages, shards_handed_on)


def test_stages_of_llama_on_a_torus(tmp_path: Path, prove: Prove, shards_handed_on: Any) -> None:
    stages = draw(tmp_path, LLAMA, "v6e:2x4", pp_size=2, tp_size=4)
    check_stages(prove, stages)
    check_hand_over(stages, shards_handed_on)


def check_stages(prove: Prove, stages: tuple[Blueprint, ...]) -> None:
    """Decode and prefill."""
    assert [list(stage.config.own_layers) for stage in stages] == [[0, 1], [2, 3]]
    for stage in stages:
        for bucket in (stage.buckets.decode[-1], stage.buckets.extend[-1]):
            check_step(prove, stage, bucket)


def check_hand_over(stages: tuple[Blueprint, ...], shards_handed_on: Any) -> None:
    """Each device has what the one in its place in the next stage takes, so that what is sent is only copied."""
    first, second = stages
    bucket = first.buckets.decode[-1]
    programs = [stage.lower(bucket, stage.pages_each(NUM_PAGES)) for stage in stages]
    made: HandedOn = programs[0].out_info[1]
    (_, _, taken, _), _ = programs[1].in_avals
    assert (made.x.shape, made.x.dtype) == (taken.x.shape, taken.x.dtype) and made.inputs is None
    wanted = NamedSharding(second.mesh, PartitionSpec(DATA_AXIS)).devices_indices_map(made.x.shape)  # as RunningStage receives
    found = shards_handed_on(first, programs[0])
    assert found["memory"] in (None, "device")
    shards = [[list(part.indices(size)) for part, size in zip(place, made.x.shape, strict=True)] for place in wanted.values()]
    assert found["shards"] == shards


@pytest.mark.parametrize(
    ("topology", "pp_size", "links"), [("v6e:2x4", 2, 2), ("v6e:4x4", 2, 4), ("v5p:2x2x2", 2, 4), ("tpu7x:2x2x2", 2, 4)]
)
def test_stages_are_blocks_of_neighbours(topology: str, pp_size: int, links: int) -> None:
    """In JAX's order of devices."""
    pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")
    target = parse_target(topology)
    for mesh in make_meshes(pp_size, target.num_devices // pp_size, list(target.devices())):
        devices = list(mesh.devices.flat)
        assert are_neighbours(target, devices) and links_out(target, devices) == links


def test_stages_of_deepseek_on_two_hosts(tmp_path: Path, prove: Prove) -> None:
    """As SGLang's users run it: a stage on each host, whole experts and groups of requests on each of its devices."""
    stages = draw(tmp_path, DEEPSEEK, "h200:2x8", pp_size=2, tp_size=8, attn_dp_size=8)
    assert [{device.process_index for device in stage.mesh.devices.flat} for stage in stages] == [{0}, {1}]
    assert [stage.config.own_sparse_layers for stage in stages] == [(), (3, 4, 5)]
    for stage in stages:
        for bucket in (stage.buckets.decode[-1], *stage.buckets.extend[-2:]):
            check_step(prove, stage, bucket)
