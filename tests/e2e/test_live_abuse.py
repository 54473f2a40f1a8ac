"""`make fuzz` and `make fuzz-api` for a few seconds each, so that they do not rot: their own reports must find no fault.

Whether a witness waits too long is left to the long run: here other tests share the machine.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from live_server import environment

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_short_mix_finds_no_fault(tmp_path: pathlib.Path, compilation_cache: str) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.abuse",
        "--minutes",
        "0.3",
        "--no-kills",
        "--crowd",
        "6",
        "--out",
        str(tmp_path),
    ]
    command += ["--", "--compilation-cache-dir", compilation_cache]
    result = subprocess.run(command, cwd=_ROOT, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [fault for fault in report["faults"] if "p99" not in fault] == [], result.stdout
    assert report["requests"] > 50
    assert report["witness"]["alone"]["whole"] > 0
    assert report["witness"]["mixed"]["requests"] > 0
    assert len(report["outcomes"]) > 15, report["outcomes"]


def test_a_few_requests_of_the_schema_find_no_fault(tmp_path: pathlib.Path, compilation_cache: str) -> None:
    command = [sys.executable, "-m", "benchmarks.abuse.api", "--minutes", "0.15", "--out", str(tmp_path)]
    command += ["--", "--compilation-cache-dir", compilation_cache]
    result = subprocess.run(command, cwd=_ROOT, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "POST /v1/chat/completions" in result.stdout
