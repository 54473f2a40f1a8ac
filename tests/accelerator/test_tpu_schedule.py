"""How long the TPU attention kernels compute, by libtpu's schedules: what the sizes they run with were chosen for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")

pytestmark = pytest.mark.compile


def schedules(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own: libtpu is told to dump its schedules when it is loaded."""
    command = [sys.executable, "-m", "benchmarks.tpu_schedule", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_decode_waits_for_memory() -> None:
    """Computing takes no longer than reading the keys and values; float8 on v6e, which has no instruction for it, nearly so."""
    rows = schedules("--ops", "decode", "--chips", "v6e", "tpu7x", "--shapes", "32/8 heads", "int8 KV", "fp8 KV")
    shares = {(row["chip"], row["shape"]): row["share"] for row in rows}
    assert all(share < (0.6 if shape == "32/8 heads" else 1.15) for (_, shape), share in shares.items()), shares


def test_extend_keeps_the_matrix_units_busy() -> None:
    """Of a v6e's peak half is in reach with head_dim 128, of a v5e's all."""
    rows = schedules("--ops", "extend", "--chips", "v5e", "v6e", "--shapes", "32/8 heads")
    v5e, v6e = (row["share"] for row in rows)
    assert v5e > 0.9 and v6e > 0.38, rows
