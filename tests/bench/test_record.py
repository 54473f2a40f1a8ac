"""Records of benchmark runs: written as lines of plain JSON, read back, SGLang's too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench import record


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    one = record.header("serving", ["jaxserve", "bench"]) | {
        "request_rate": float("inf"),
        "x": np.float32(0.5),
        "nan": float("nan"),
    }
    record.append_record(path, one)
    record.append_record(path, {"request_rate": 2})
    first, second = record.read_records(path)
    assert first["jaxserve_bench"]["command"] == ["jaxserve", "bench"]
    assert record.kind_of(first) == record.kind_of(second) == "serving"
    assert (record.number(first, "request_rate"), record.number(second, "request_rate")) == (float("inf"), 2.0)
    assert (first["x"], first["nan"], record.number(first, "nan")) == (0.5, None, None)
    assert "Infinity" not in path.read_text()  # which is no JSON


def test_latencies_by_hand() -> None:
    fields = record.latency_fields("ttft", [0.001, 0.002, 0.003, 0.004])
    assert list(fields) == [f"{name}_ttft_ms" for name in record.STATISTICS]
    expected = {"mean": 2.5, "median": 2.5, "std": 1.25**0.5, "p90": 3.7, "p95": 3.85, "p99": 3.97}
    assert fields == pytest.approx({f"{name}_ttft_ms": value for name, value in expected.items()})
    assert set(record.latency_fields("itl", []).values()) == {None}


@pytest.mark.parametrize(("line", "words"), [("{", "line 2: not JSON"), ("[1]", "line 2: not an object")])
def test_a_line_that_is_no_record(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"completed": 1}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=words):
        list(record.read_records(path))


def test_whether_a_file_can_be_written_is_asked_without_a_trace(tmp_path: Path) -> None:
    record.check_writable(tmp_path / "new.jsonl")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="nowhere"):
        record.check_writable(tmp_path / "nowhere" / "runs.jsonl")
