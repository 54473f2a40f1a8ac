"""The device benchmark's smoke mode: every section runs on a CPU, kernels interpreted, and the folder says what ran.

What a run survives is tested without JAX, in tests/benchmarks.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device.case import Setting
from benchmarks.device.decode import decode_shapes
from benchmarks.device.extend import extend_shapes
from benchmarks.device.machine import UnfitMachineError
from benchmarks.device.mla import mla_shapes
from benchmarks.device.model import plans
from benchmarks.device.predictions import PREDICTIONS
from benchmarks.device.profile import PROFILED
from benchmarks.device.sections import NAMES
from benchmarks.device.tune import check_shape
from benchmarks.device.write import cases as write_cases

ROOT = Path(__file__).resolve().parents[2]
NO_TORCH = "torch is not installed" if importlib.util.find_spec("torch") is None else "needs a CUDA device"
NEEDS_CUDA = {"torch", "jax", "profile", "sanitize", "tune"}
# `make device-dry-run` runs the others, too: more kernels timed in the same way, and a server, which compiles long.
# tests/benchmarks has the checkpoint of `parity`.
SMOKED = [name for name in NAMES if name not in ("extend", "mla", "parity", "server")]


def needs_torch(case: dict[str, Any]) -> bool:
    return case["section"] == "torch" or case["name"].endswith(", torch")


def test_smoke(tmp_path: Path) -> None:
    options = ("--commit", "abc", "--wheels", "none", "--only", *SMOKED)
    command = [sys.executable, "-m", "benchmarks.device", "--smoke", "--out", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "report.md").read_text()

    document = json.loads((tmp_path / "results.json").read_text())
    machine = document["runs"][0]["machine"]
    assert machine["commit"] == "abc" and machine["versions"]["jax"] and machine["gpu"]["name"] == "cpu"
    assert {"copy_gb_per_s", "read_gb_per_s", "matmul_tflop_per_s"} == document["ceilings"].keys()
    cases = document["cases"]
    assert {case["section"] for case in cases} == set(SMOKED)
    for case in cases:
        if case["status"] == "not here":
            assert case["reason"] == (NO_TORCH if needs_torch(case) else "needs a CUDA device"), case
        elif case["name"] == "toolkit":
            assert case["cuda_path"] != "None" and case["jax"] == machine["versions"]["jax"]
        elif case["section"] in ("checks", "canary"):
            assert case["status"] == "ok" and case["error"] <= case.get("limit", 1), case
        else:
            assert case["status"] == "ok" and case["us"] > 0, case
    ran = {case["section"] for case in cases if case["status"] == "ok"}
    assert ran == set(SMOKED) - NEEDS_CUDA
    assert "## Predictions and measurements" in (tmp_path / "report.md").read_text()


def test_predictions_and_profiles_are_of_cases_that_exist() -> None:
    full = Setting()
    names = {*decode_shapes(full), *extend_shapes(full), *mla_shapes(full), *(case.name for case in write_cases(full))}
    names |= {f"{plan.model} decode {batch} x {plan.context}" for plan in plans(full).values() for batch in plan.batches}
    asked = {prediction.case for prediction in PREDICTIONS} | {prediction.over for prediction in PREDICTIONS if prediction.over}
    asked |= {case for _, case, _ in PROFILED}
    assert asked <= names, asked - names


@pytest.mark.parametrize(("shape", "reason"), [("32/8,100,64,bfloat16", "100"), ("32/5,128,64,bfloat16", "multiple")])
def test_a_shape_that_no_kernel_takes(shape: str, reason: str) -> None:
    with pytest.raises(UnfitMachineError, match=reason):
        check_shape(shape)
    check_shape("32/4,128,64,bfloat16")
