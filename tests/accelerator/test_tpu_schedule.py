"""How long the TPU attention kernels compute, by libtpu's schedules: what the sizes they run with were chosen for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import tpu_schedule
from tests.accelerator.proofs import Record, study_rows

pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")

pytestmark = pytest.mark.compile


@pytest.fixture
def schedules(record: Record, request: pytest.FixtureRequest) -> Callable[..., list[dict[str, Any]]]:
    def of(op: str, chips: list[str], shapes: list[str]) -> list[dict[str, Any]]:
        arguments = ["--ops", op, "--chips", *chips, "--shapes", *shapes]
        programs = (tpu_schedule.lower(chip, shape, op) for chip in chips for shape in shapes)
        return study_rows(record, request.node.nodeid, tpu_schedule.__name__, arguments, programs)

    return of


def test_decode_waits_for_memory(schedules: Callable[..., list[dict[str, Any]]]) -> None:
    """Computing takes no longer than reading the keys and values; float8, which is multiplied as it is, clearly less."""
    rows = schedules("decode", ["v6e", "tpu7x"], ["32/8 heads", "int8 KV", "fp8 KV"])
    shares = {(row["chip"], row["shape"]): row["share"] for row in rows}
    bounds = {"32/8 heads": 0.6, "int8 KV": 1.0, "fp8 KV": 0.8}
    assert all(share < bounds[shape] for (_, shape), share in shares.items()), shares


def test_extend_keeps_the_matrix_units_busy(schedules: Callable[..., list[dict[str, Any]]]) -> None:
    """Of a v6e's peak half is in reach with head_dim 128, of a v5e's all."""
    rows = schedules("extend", ["v5e", "v6e"], ["32/8 heads"])
    v5e, v6e = (row["share"] for row in rows)
    assert v5e > 0.9 and v6e > 0.38, rows
