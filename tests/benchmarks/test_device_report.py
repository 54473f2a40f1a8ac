"""The report: rates, floors, predictions beside numbers, and what a run left out. Pure functions of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.device.events import EventLog, latest_results
from benchmarks.device.predictions import PREDICTIONS
from benchmarks.device.rates import finish
from benchmarks.device.report import summary, write_report
from benchmarks.device.sections import NAMES

MACHINE = {
    "gpu": {"name": "NVIDIA H200", "driver_version": "580"}, "cpus": 16, "python": "3.12.3", "versions": {"jax": "0.11.2"},
    "ptxas": {"/usr/local/cuda/bin/ptxas": "13.0"}, "commit": "abc",
}  # fmt: skip


def test_rates_shares_and_floors() -> None:
    ceiling = {"section": "ceilings", "status": "ok"}
    results: list[dict[str, Any]] = [
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


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "run")
    log.emit("run", machine=MACHINE, only=["decode"])
    log.emit("planned", section="decode", names=["decode 64 x 4096", "decode 64 x 4096, fp8 KV", "decode 16 x 4096"])
    log.emit("result", section="ceilings", name="read, JAX", status="ok", us=1000.0, bytes=4_400_000_000)
    log.emit("result", section="decode", name="decode 64 x 4096", status="ok", us=260.0, bytes=1_074_000_000)
    log.emit("result", section="decode", name="decode 64 x 4096, fp8 KV", status="ok", us=200.0, bytes=540_000_000)
    log.emit("gpu", **{"clocks.sm": "1980 MHz", "power.draw": "612.30 W"})
    log.emit("result", section="jax", name="cuDNN", status="ok", us=520.0, against="decode 64 x 4096", error=float("nan"))
    log.emit("start", section="decode", name="decode 16 x 4096", limit_s=1)
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| decode 64 x 4096 | us | 250 to 270 |  | 260 |" in text
    assert "| decode 64 x 4096 | share_of_bandwidth | 0.89 to 0.95 | 0.92 | 0.939 |" in text
    assert "| decode 64 x 4096, fp8 KV | times as fast as decode 64 x 4096 | 1.25 to 1.45 | 1.6 | 1.3 |" in text
    assert "| extend 16384 | tflop_per_s | 610 to 640 | 660 | not measured |" in text
    assert "decode: left out: a run ended while it ran: decode 16 x 4096" in text
    assert "* decode: clocks.sm 1980 to 1980, power.draw 612.3 to 612.3" in text
    assert "| cuDNN | 520.0 |" in text and "| 2.00 |" in text
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["runs"][0]["machine"] == MACHINE and len(document["cases"]) == 5


def test_the_time_that_did_not_reach_a_case_hides_no_result() -> None:
    def result(time_s: float, status: str) -> dict[str, Any]:
        return {"event": "result", "section": "decode", "name": "one", "status": status, "time_s": time_s}

    latest = latest_results([result(1, "ok"), result(2, "left out")])
    assert latest["decode", "one"]["status"] == "ok"
    assert latest_results([result(1, "ok"), result(2, "failed")])["decode", "one"]["status"] == "failed"
    assert latest_results([result(1, "left out"), result(2, "ok")])["decode", "one"]["status"] == "ok"


def test_the_fastest_configs_become_a_tuning_table(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "run")
    for name, changes, us in (("default", {}, [100.0, 10.0]), ("two streams", {"streams": 2}, [80.0, 9.0])):
        fields = {"op": "decode", "key": "decode 32/8", "changes": changes, "config": {"streams": 1, **changes}}
        log.emit("result", section="tune", name=name, status="ok", us_of_steps=us, device_kind="NVIDIA H200", **fields)
    write_report(tmp_path)
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"NVIDIA H200": {"decode 32/8": {"streams": 2}}}


def test_predictions_are_of_cases_that_exist() -> None:
    """By section; the case names themselves are checked where JAX can list them."""
    assert all(prediction.low is None or prediction.low <= prediction.high for prediction in PREDICTIONS)
    assert len({(prediction.case, prediction.metric) for prediction in PREDICTIONS}) == len(PREDICTIONS)
    assert summary([])["cases"] == [] and len(NAMES) == len(set(NAMES))
