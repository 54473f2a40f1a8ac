"""`python -m benchmarks.device` asked wrongly: one line, at once, and nothing is started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.device.machine import UnfitMachineError, install
from benchmarks.device.profile import parse
from benchmarks.device.sanitize import summary

ROOT = Path(__file__).resolve().parents[2]
SMI = """#!/bin/sh
echo 'NVIDIA A100-SXM4-80GB, 580.1, 81920 MiB, 8.0, 400 W, 1410 MHz, 1593 MHz'
"""


def ask(*words: str, path: str = "/usr/bin:/bin") -> tuple[int, list[str]]:
    """Exit status and lines; the PATH says which nvidia-smi there is."""
    environment = {**os.environ, "PATH": path}
    command = [sys.executable, "-m", "benchmarks.device", *words]
    started_s = time.time()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert time.time() - started_s < 30
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(("usage:", " "))]


def test_unknown_section(tmp_path: Path) -> None:
    code, lines = ask("--out", str(tmp_path / "out"), "--only", "decodes")
    assert code == 2 and len(lines) == 1
    assert "invalid choice: 'decodes'" in lines[0] and "decode" in lines[0] and "sanitize" in lines[0]
    assert not (tmp_path / "out").exists()


def test_no_gpu(tmp_path: Path) -> None:
    code, lines = ask("--out", str(tmp_path / "out"), path=str(tmp_path))
    assert code == 2
    assert lines == ["benchmarks.device: this needs an NVIDIA Hopper GPU, and nvidia-smi finds none; --smoke runs without"]


def test_another_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    code, lines = ask("--out", str(tmp_path / "out"), path=f"{tmp_path}:/usr/bin:/bin")
    assert code == 2 and len(lines) == 1
    assert "compute capability 9.0" in lines[0] and "NVIDIA A100-SXM4-80GB (8.0)" in lines[0]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, lines = ask("--smoke", "--out", str(tmp_path / "file" / "out"))
    assert code == 2 and len(lines) == 1 and "cannot be written to" in lines[0]


def test_a_folder_to_merge_that_is_none(tmp_path: Path) -> None:
    code, lines = ask("--smoke", "--out", str(tmp_path / "out"), "--merge", str(tmp_path / "nowhere"))
    assert code == 2 and len(lines) == 1 and "there is no events.jsonl to read" in lines[0]


def test_a_shape_that_reads_wrongly(tmp_path: Path) -> None:
    """What the kernels say of shapes that they do not take is tested in tests/accelerator."""
    code, lines = ask("--smoke", "--out", str(tmp_path / "out"), "--only", "tune", "--shape", "32/8,128,64")
    assert code == 2
    assert lines == ["benchmarks.device: --shape 32/8,128,64: it must read HEADS/KV_HEADS,HEAD_DIM,PAGE_SIZE,KV_DTYPE"]


def test_wheels_for_another_python(tmp_path: Path) -> None:
    (tmp_path / "one-1.0-cp39-cp39-win32.whl").touch()
    with pytest.raises(UnfitMachineError, match="cannot be installed"):
        install(tmp_path, str(tmp_path / "site"))


def test_the_table_that_ncu_prints() -> None:
    names = (
        '"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed",'
        '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",'
        '"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"'
    )
    found = parse(["==PROF== Connected", names, '"","","%","inst","inst"', '"0","paged_decode","91.25","1,000.5","0.25"'])
    assert found["dram (%)"] == 91.25 and found["kernel"] == "paged_decode"
    assert found["stalled warps per issue"] == {"barrier": 1000.5, "wait": 0.25}


def test_what_the_sanitizer_found() -> None:
    assert summary("========= ERROR SUMMARY: 0 errors\n") == 0
    assert summary("========= ERROR SUMMARY: 3 errors\n") == 3
    assert summary("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n") == 2
    assert summary("it did not start") is None
