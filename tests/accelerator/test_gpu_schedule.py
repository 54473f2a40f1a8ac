"""What the GPU kernels' main loops are made of, by their machine code: bounds that a change must not exceed unnoticed.

A bound is a little above what was read when it was set. Lower it with the code; raise it only for a reason.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from benchmarks import gpu_schedule
from jaxserve.kernels.pallas.gpu.common import MOVES_REGISTERS
from tests.accelerator.proofs import Record, study_rows

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not MOVES_REGISTERS, reason="other tiles: JAX 0.12 moves no registers"),
]


@dataclasses.dataclass(frozen=True)
class Bound:
    """The most that a turn of a main loop may have, edges aside."""

    instructions: int
    block_barriers: int = 0
    products: int = 0  # exactly
    copies: int = 0  # exactly


# Case of benchmarks.gpu_schedule -> loop -> bound. Of several loops of one kind, all of them.
BOUNDS: dict[str, dict[str, Bound]] = {
    "decode bf16": {"consumer": Bound(340, products=12), "producer": Bound(55, copies=2)},
    "decode fp8": {"consumer": Bound(425, products=12), "producer": Bound(225, block_barriers=2, copies=4)},
    "decode int8": {"consumer": Bound(400, products=12), "producer": Bound(475, block_barriers=2, copies=4)},
    "extend bf16": {"consumer": Bound(650, products=16), "producer": Bound(140, block_barriers=4, copies=4)},
    "extend fp8": {"consumer": Bound(560, products=12), "producer": Bound(460, block_barriers=14, copies=4)},
    "mla decode, 128 heads": {"consumer": Bound(745, block_barriers=6, products=44, copies=1)},
}
# Loops whose quickest form, the one without masks, has a bound of its own.
QUICKEST = {"extend bf16": 490, "extend fp8": 430}


@pytest.fixture(scope="module")
def studies(record: Record) -> dict[str, Any]:
    """In a process of its own: what another test has compiled would not be compiled again, nor read."""
    programs = (gpu_schedule.lower(gpu_schedule.STUDIES[case]) for case in BOUNDS)
    rows = study_rows(record, __name__, gpu_schedule.__name__, ["--cases", *BOUNDS], programs)
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("case", BOUNDS)
def test_main_loops_stay_within_their_bounds(studies: dict[str, Any], case: str) -> None:
    loops = studies[case]["loops"]
    assert {loop["role"] for loop in loops} == set(BOUNDS[case])
    for loop in loops:
        bound, about = BOUNDS[case][loop["role"]], {name: value for name, value in loop.items() if name != "mix"}
        assert loop["instructions"] <= bound.instructions and loop["block_barriers"] <= bound.block_barriers, about
        assert (loop["products"], loop["copies"]) == (bound.products, bound.copies), about
        assert loop["spills"] == 0, about
    assert quickest(studies[case])["instructions"] <= QUICKEST.get(case, 10_000)


def test_mla_multiplies_as_soon_as_the_other_consumer_has_made_weights(studies: dict[str, Any]) -> None:
    """Rescaling its own half, 128 multiplications, comes before the wait for them."""
    for loop in studies["mla decode, 128 heads"]["loops"]:
        *_, wait, others, product, _, _, _ = loop["path"].split(" | ")
        assert (wait, product) == ("wait", "4 of 64x256x16") and int(others) <= 40, loop["path"]


def test_extend_weighs_one_tile_while_it_adds_the_values_of_another(studies: dict[str, Any]) -> None:
    """Between the waits for scores and for values stands the softmax; behind both are left 64 multiplications, and casts."""
    for case, softmax, behind in (("extend bf16", 260, 110), ("extend fp8", 220, 95)):
        _, beside, after = re.split(r"in flight [01]", quickest(studies[case])["path"])
        assert instructions(beside) >= softmax and instructions(after) <= behind, (beside, after)


def quickest(study: dict[str, Any]) -> dict[str, Any]:
    """The multiplying loop without masks."""
    found: dict[str, Any] = min((loop for loop in study["loops"] if loop["products"]), key=lambda loop: loop["instructions"])
    return found


def instructions(path: str) -> int:
    """Of a piece of a path, without products, waits and barriers."""
    return sum(int(word) for word in path.split(" | ") if word.isdigit())


def test_decode_waits_for_memory(studies: dict[str, Any]) -> None:
    assert studies["decode bf16"]["tile"]["bound"] == "memory"


def test_tensor_cores_set_the_pace_of_extend(studies: dict[str, Any]) -> None:
    assert studies["extend bf16"]["tile"]["bound"] == "tensor"
