"""The device benchmark's smoke mode: every section runs on a CPU, kernels interpreted, and the JSON says what ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.device.case import SECTIONS
from benchmarks.device.report import finish
from benchmarks.device.supervisor import Budget, WorkerProcess, _watch

ROOT = Path(__file__).resolve().parents[2]


def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    command = [sys.executable, "-m", "benchmarks.device", "--smoke", "--out", str(out), "--commit", "abc"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "µs" in done.stdout and "checks: 5 of 5 passed" in done.stdout

    document = json.loads(out.read_text())
    assert document["commit"] == "abc" and document["versions"]["jax"] and document["date"]
    assert document["device"]["name"] == "cpu" and document["smoke"]
    assert {"copy_gb_per_s", "read_gb_per_s", "matmul_tflop_per_s"} == document["ceilings"].keys()
    cases = document["cases"]
    assert {case["section"] for case in cases} == set(SECTIONS)
    assert not [case for case in cases if case["status"] == "failed"]
    for case in cases:
        if case["status"] == "not here":
            assert case["reason"] == "needs a CUDA device", case
        elif case["section"] == "checks":
            assert 0 < case["error"] < case.get("limit", 1), case
        else:
            is_plan = case["name"].startswith("plan of ")
            assert case["status"] == "ok" and case["us"] > 0, case
            assert is_plan or case.get("bytes") or case.get("flop"), case
    ran = {case["section"] for case in cases if case["status"] == "ok"}
    assert ran == {"ceilings", "checks", "decode", "extend", "mla", "write", "model"}


def test_a_hang_and_a_crash_end_one_case_each(tmp_path: Path, monkeypatch: object) -> None:
    """Cases of a made-up section: one returns, one hangs, one kills its process, one fails, one returns."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.path.insert(0, " + repr(str(ROOT)) + ")\n"
        "import benchmarks.device.case as c\n"
        "import os, time\n"
        "c.SECTIONS['made-up'] = 'made_up'\n"
        "m = types.ModuleType('made_up')\n"
        "runs = {'good': lambda: {'us': 2.0, 'bytes': 10}, 'hang': lambda: time.sleep(60), 'crash': lambda: os._exit(7),\n"
        "        'raise': lambda: 1 / 0, 'last': lambda: {'us': 4.0, 'against': 'good'}}\n"
        "m.cases = lambda setting: [c.Case(name, run, limit_s=1.5) for name, run in runs.items()]\n"
        "sys.modules['made_up'] = m\n"
    )
    environment = dict(os.environ)
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        budget = Budget(time.time(), 120, {"made-up": 1.0})
        found = _watch([WorkerProcess(["made-up"], tmp_path, budget, 0, 1, smoke=True)])
    finally:
        os.environ.clear()
        os.environ.update(environment)
    _, results = finish(found)
    by_name = {result["name"]: result for result in results}
    assert {name: result["status"] for name, result in by_name.items()} == {
        "good": "ok", "hang": "failed", "crash": "failed", "raise": "failed", "last": "ok",
    }  # fmt: skip
    assert by_name["hang"]["reason"].startswith("it hung") and "exit code 7" in by_name["crash"]["reason"]
    assert by_name["raise"]["reason"].startswith("ZeroDivisionError")
    assert by_name["last"]["theirs_over_ours"] == 2.0


def test_what_the_time_does_not_reach_is_listed(tmp_path: Path) -> None:
    budget = Budget(time.time() - 1000, 990, {"ceilings": 1.0})
    found = _watch([WorkerProcess(["ceilings"], tmp_path, budget, 0, 1, smoke=True)])
    assert found and all(result["status"] in ("left out", "failed") for result in found)


def test_rates_shares_and_floors() -> None:
    ceiling = {"section": "ceilings", "status": "ok"}
    results = [
        {**ceiling, "name": "copy, JAX", "us": 1000.0, "bytes": 4_000_000_000},
        {**ceiling, "name": "read, torch", "us": 1000.0, "bytes": 5_000_000_000},
        {**ceiling, "name": "matmul, JAX", "us": 1000.0, "flop": 700_000_000_000},
        {"section": "decode", "name": "ours", "status": "ok", "us": 100.0, "bytes": 250_000_000, "flop": 7_000_000_000},
    ]
    ceilings, found = finish(results)
    assert ceilings == {"copy_gb_per_s": 4000.0, "read_gb_per_s": 5000.0, "matmul_tflop_per_s": 700.0}
    ours = found[-1]
    assert (ours["gb_per_s"], ours["share_of_bandwidth"], ours["share_of_matmul"]) == (2500.0, 0.5, 0.1)
    assert (ours["floor_us"], ours["share_of_floor"]) == (50.0, 0.5)
