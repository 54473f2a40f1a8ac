"""`bench plot`: which pictures come of which records, that they say what they should, and are the same each time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.plots import load_runs, pictures
from jaxserve.bench.record import append_record, header, latency_fields
from jaxserve.cli.main import run

TIMELINE = {"time_s": [0, 1, 2], "num_running_reqs": [0, None, 2], "num_waiting_reqs": [0, 3, 0], "token_usage": [0, 0.25, 0.5]}


def sweep(path: Path, rates: tuple[Any, ...] = (4, 1, "inf"), **fields: Any) -> Path:
    for rate in rates:
        ttfts = [0.01, 0.02, 0.4]
        record = {**header("serving", ["bench"]), "dataset_name": "random", "request_rate": rate, "output_throughput": 100.0}
        for name in ("ttft", "tpot", "e2e_latency"):
            record |= latency_fields(name, ttfts)
        append_record(path, record | fields)
    return path


def details() -> dict[str, Any]:
    return {"ttfts": [0.1, 0.2, 0.0], "e2e_latencies": [0.3, 0.6, 0.0], "output_lens": [3, 5, 0],
            "itls": [[0.1, 0.1], [0.1] * 4, []],
            "errors": ["", "", "HTTP 503"]}  # fmt: skip


def test_a_sweep(tmp_path: Path) -> None:
    runs = load_runs([sweep(tmp_path / "sweep.jsonl", **details(), timeline=TIMELINE)])
    assert [run.name for run in runs] == ["1 req/s", "4 req/s", "inf req/s"]
    found = {picture.name: picture.figure for picture in pictures(runs)}
    assert list(found) == ["latency_cdf", "throughput_latency", "timeline_1", "timeline_2", "timeline_3"]
    ttft, tpot, e2e = found["latency_cdf"].axes
    assert [axis.get_title() for axis in (ttft, tpot, e2e)] == ["TTFT", "TPOT", "E2E latency"]
    line = ttft.get_lines()[0]  # without the request that failed
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([100.0, 200.0], [50.0, 100.0])
    assert list(tpot.get_lines()[0].get_xdata()) == pytest.approx([100.0, 100.0])
    assert [text.get_text() for text in found["throughput_latency"].axes[0].texts] == ["1", "4", "inf"]
    requests, memory = found["timeline_2"].axes
    np.testing.assert_array_equal(requests.get_lines()[0].get_ydata(), [0, np.nan, 2])
    assert list(memory.get_lines()[0].get_ydata()) == [0, 25, 50]


def test_files_beside_each_other(tmp_path: Path) -> None:
    paths = [sweep(tmp_path / name) for name in ("old.jsonl", "new.jsonl")]
    (picture,) = pictures(load_runs(paths))
    _, labels = picture.figure.axes[0].get_legend_handles_labels()
    assert labels == ["old, median", "old, p99", "new, median", "new, p99"]


def test_the_command_draws_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep(tmp_path / "sweep.jsonl", rates=(1,), **details(), timeline=TIMELINE)
    for folder in ("one", "two"):
        assert run(["bench", "plot", str(path), "--out", str(tmp_path / folder)]) == 0
    names = ["latency_cdf.svg", "timeline.svg"]
    assert capsys.readouterr().out.split() == [str(tmp_path / folder / name) for folder in ("one", "two") for name in names]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert run(["bench", "plot", str(path), "--out", str(tmp_path), "--format", "png"]) == 0


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = sweep(tmp_path / "one.jsonl", rates=(1,))
    assert run(["bench", "plot", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "nothing to draw (--output-details)" in capsys.readouterr().err
    append_record(tmp_path / "steps.jsonl", {**header("latency"), "prefill_latency": 1.0})
    assert run(["bench", "plot", str(tmp_path / "steps.jsonl"), "--out", str(tmp_path / "out")]) == 1
    assert "has no records of bench serving" in capsys.readouterr().err
    assert run(["bench", "plot", str(path), "--out", str(path)]) == 2
    for name in [name for name in sys.modules if name.startswith("jaxserve.bench.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "plot", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'jaxserve[plots]'" in capsys.readouterr().err
