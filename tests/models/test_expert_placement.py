"""Experts on groups of devices, in slices, and several times: logits against Transformers, and who holds what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_model import folder_logits, mesh_of, oracle_logits, program_of, prompt
from jax.sharding import NamedSharding
from model_families import CASES

from jaxserve.aot.hlo import count_collectives, expected_collectives
from jaxserve.commands import DumpExpertRecord, StartExpertRecord
from jaxserve.executor.expert_record import ExpertRecord
from jaxserve.models import ModelConfig, abstract_params
from jaxserve.models.conversion import convert
from jaxserve.models.expert_placement import ExpertPlacement, ExpertSlots, balanced, place_experts
from jaxserve.models.specs import MoESpec

CheckpointOf = Callable[[str], Path]

SPEC = MoESpec(num_experts=8, experts_per_token=2, intermediate_size=12)
MIXTURES = [
    name for name, case in CASES.items() if "moe" in case.family.lower() and case.kwargs.get("num_local_experts") != 0
] + [
    "qwen3-next",
    "mixtral",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "deepseek-v3-fp8",
]


def place(layers: list[MoESpec | None] | None = None, **options: Any) -> ExpertPlacement | None:
    asked: dict[str, Any] = {"tp_size": 4, "ep_size": None, "num_redundant": 0, "location": "trivial", **options}
    return place_experts(layers=layers or [SPEC, None, SPEC], architecture="Some", **asked)


def check_logits(folder: Path, tp_size: int, ep_size: int, num_redundant: int, seed: int | None) -> None:
    """Placed in order, or by a made-up record."""
    config = ModelConfig.from_pretrained(folder)
    location = "trivial"
    if seed is not None:
        counts = np.random.default_rng(seed).integers(0, 1000, (config.num_layers, config.num_experts))
        location = json.dumps({"logical_count": counts.tolist()})
    options = {"tp_size": tp_size, "ep_size": ep_size, "num_redundant": num_redundant, "location": location}
    placement = place(list(config.mixtures), **options)
    assert placement is not None
    ids = prompt(24, config.vocab_size)
    logits = folder_logits(folder, ids, tp_size, expert_placement=placement)
    np.testing.assert_allclose(logits, oracle_logits(folder, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "tp_size", "ep_size", "num_redundant", "seed"),
    [
        ("mixtral", 4, 4, 4, 0),
        ("gpt-oss", 4, 2, 2, 1),
        ("gpt-oss-mxfp4", 2, 1, 0, None),
        ("deepseek-v3-fp8", 4, 2, 0, 2),
    ],
)
def test_logits_equal_those_of_transformers(
    name: str, tp_size: int, ep_size: int, num_redundant: int, seed: int | None, checkpoint: CheckpointOf
) -> None:
    check_logits(checkpoint(name), tp_size, ep_size, num_redundant, seed)


@pytest.mark.matrix
@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_every_mixture(name: str, ep_size: int, checkpoint: CheckpointOf) -> None:
    check_logits(checkpoint(name), 4, ep_size, 4 if ep_size > 1 else 0, 0 if ep_size > 1 else None)


@pytest.mark.parametrize("ep_size", [2])
def test_dummy_weights_are_the_same_model(ep_size: int, checkpoint: CheckpointOf) -> None:
    folder, ids = checkpoint("gpt-oss"), prompt(8, 300)
    placement = place(list(ModelConfig.from_pretrained(folder).mixtures), ep_size=ep_size, num_redundant=4)
    expected = folder_logits(folder, ids, 1, load_format="dummy")
    logits = folder_logits(folder, ids, 4, load_format="dummy", expert_placement=placement)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ep_size", [1])
def test_converted_weights_are_placed(ep_size: int, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder, ids = checkpoint("gpt-oss"), prompt(8, 300)
    placement = place(
        list(ModelConfig.from_pretrained(folder).mixtures), tp_size=2, ep_size=ep_size, num_redundant=2 * (ep_size - 1)
    )
    expected = folder_logits(folder, ids, 1)
    logits = folder_logits(convert(folder, tmp_path, progress=False), ids, 2, load_format="orbax", expert_placement=placement)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_collectives_are_those_of_whole_experts(ep_size: int, checkpoint: CheckpointOf) -> None:
    config = ModelConfig.from_pretrained(checkpoint("gpt-oss"))
    config = config.replace(expert_placement=place(list(config.mixtures), ep_size=ep_size, num_redundant=4 * (ep_size > 1)))

    def shape(info: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(mesh_of(4), info.spec))

    params, ids = jax.tree.map(shape, abstract_params(config, jnp.float32, 4)), jax.ShapeDtypeStruct((8,), jnp.int32)
    hlo = program_of(config, 4).lower(params, ids, ids).compile().as_text()
    assert count_collectives(hlo) == expected_collectives(config, 4)


def test_quantized_experts_are_placed(checkpoint: CheckpointOf) -> None:
    """Of whole experts the scales are the same wherever they stand."""
    folder, ids = checkpoint("mixtral"), prompt(8, 300)
    placement = place(list(ModelConfig.from_pretrained(folder).mixtures), num_redundant=4)
    expected = folder_logits(folder, ids, 1, quantization="int8wo")
    logits = folder_logits(folder, ids, 4, quantization="int8wo", expert_placement=placement)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_whole_experts_in_order_are_no_placement() -> None:
    assert place() is None
    assert place(ep_size=4) is None
    assert place([None, None], tp_size=2, ep_size=1) is None


def test_slots_of_devices() -> None:
    placement = place(ep_size=2, num_redundant=2)
    assert placement is not None
    slots = placement.slots_of(1, 8, 4)
    assert slots == ExpertSlots((0, 1, 2, 3, 4, 5, 6, 7, 0, 1), 2, slices=2, most_copies=2)
    first, second = [(expert, part) for part in (0, 1) for expert in range(5)], [(5, 0), (6, 0), (7, 0), (0, 0), (1, 0)]
    assert slots.by_device == [*first, *second, *((expert, 1) for expert, _ in second)]
    table = slots.table
    assert table is not None
    assert table[:3].tolist() == [[2, 0, 8], [2, 1, 9], [1, 2, 0]]


def test_what_is_in_demand_is_held_twice_and_apart() -> None:
    loads = [100, 1, 1, 1, 50, 1, 1, 1]
    experts = balanced(loads, 10, 2)
    groups = [experts[:5], experts[5:]]
    assert all(0 in group and 4 in group for group in groups)
    assert sorted(set(experts)) == list(range(8))
    work = [sum(loads[expert] / experts.count(expert) for expert in group) for group in groups]
    assert max(work) - min(work) <= 2


@pytest.mark.parametrize("num_groups", [2, 4, 8])
def test_groups_get_about_as_much(num_groups: int) -> None:
    """Of loads as routers make them: at most a tenth above the mean, which in order is far off."""
    loads = 1000 * np.random.default_rng(num_groups).pareto(1.5, 128)
    experts = np.array(balanced(loads.tolist(), 160, num_groups))
    share = loads / np.bincount(experts)
    work = share[experts].reshape(num_groups, -1).sum(axis=1)
    assert work.max() < 1.1 * work.mean()
    assert loads.reshape(num_groups, -1).sum(axis=1).max() > 1.1 * work.mean()


def test_a_record_is_read(tmp_path: Path) -> None:
    record, file = ExpertRecord(3, [0, 2]), tmp_path / "record.json"
    counts = np.array([[9, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 9]], np.uint32)
    record.carry_out(StartExpertRecord(), np.zeros_like(counts))  # type: ignore[arg-type]
    record.carry_out(DumpExpertRecord(str(file)), counts)  # type: ignore[arg-type]
    placement = place(num_redundant=4, location=str(file))
    assert placement is not None
    assert [placement.experts[0].count(0), placement.experts[1].count(7)] == [4, 4]
    steps = json.dumps({"logical_count": [counts.tolist(), counts.tolist()]})
    assert place(num_redundant=4, location=steps) == placement


def test_a_map_is_taken_as_it_is() -> None:
    rows = [list(range(8)), [0] * 8, list(range(7, -1, -1))]
    placement = place(location=json.dumps({"physical_to_logical_map": rows}))
    assert placement is not None
    assert placement.experts == (tuple(rows[0]), tuple(rows[2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep_size": 3}, "--ep-size must divide --tp-size 4; got 3."),
        ({"num_redundant": 3}, "num_experts=8 and --ep-num-redundant-experts 3 together; got 4."),
        ({"tp_size": 8, "ep_size": 1}, "must divide the size of an expert, 12; got 8 / 1 = 8."),
        ({"num_redundant": 28}, "--ep-num-redundant-experts must be at most 24"),
        ({"ep_size": 1, "location": "{}"}, "--init-expert-location needs several groups"),
        ({"location": "x.pt"}, "takes JSON or a file of it"),
        ({"location": "missing.json"}, "cannot be read as JSON"),
        ({"location": "{"}, "cannot be read as JSON"),
        ({"location": "[]"}, "with physical_to_logical_map or logical_count"),
        ({"location": '{"logical_count": [[1, 2], [3]]}'}, "must be whole numbers"),
        ({"location": '{"logical_count": [[1, 2], [3, 4]]}'}, r"must be \[3 or 2, 8\] numbers; got \[2, 2\]"),
        ({"location": json.dumps({"logical_count": [[-1] * 8] * 3})}, "must not be negative; got -1"),
        ({"location": json.dumps({"physical_to_logical_map": [[0] * 8] * 3})}, "all of 8 experts"),
        ({"layers": [None], "num_redundant": 4}, "--ep-size 4 needs a model with experts; Some has none"),
        ({"layers": [None], "ep_size": 2}, "--ep-size 2 needs a model with experts; Some has none"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(**options)
