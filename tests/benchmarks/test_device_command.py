"""`python -m benchmarks.device` asked wrongly: one line, at once, and nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.device.__main__ import forget
from benchmarks.device.events import EventLog, done, read_events
from benchmarks.device.machine import UnfitMachineError, install
from benchmarks.device.profile import parse
from benchmarks.device.sanitize import summary

ROOT = Path(__file__).resolve().parents[2]
A100 = "echo 'NVIDIA A100-SXM4-80GB, 580.1, 81920 MiB, 8.0, 400 W, 1410 MHz, 1593 MHz'"
H200 = "echo 'NVIDIA H200, 580.1, 143771 MiB, 9.0, 700 W, 1980 MHz, 3201 MHz'"
NCU = """echo '==PROF== Connected'
echo '"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed","sm__cycles_active.min","sm__cycles_active.avg"\
,"sm__cycles_active.max","sm__cycles_elapsed.max"'
echo '"","","%","cycle","cycle","cycle","cycle"'
echo '"0","paged_decode_mosaic","91.5","300,000","340,000.5","390,000","400,000"'"""
SANITIZER = (
    "case $2 in racecheck) echo 'RACECHECK SUMMARY: 1 hazard displayed'; exit 99;; *) echo 'ERROR SUMMARY: 0 errors';; esac"
)


def ask(*words: str, path: str = "/usr/bin:/bin") -> tuple[int, list[str]]:
    """Exit status and lines; the PATH says which nvidia-smi there is."""
    environment = {**os.environ, "PATH": path}
    command = [sys.executable, "-m", "benchmarks.device", "--wheels", "none", *words]
    started_s = time.time()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert time.time() - started_s < 30
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(("usage:", " "))]


def pretend(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


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
    pretend(tmp_path, "nvidia-smi", A100)
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


def test_a_run_on_what_looks_like_a_gpu(tmp_path: Path) -> None:
    """The sections that only start other programs, with programs that say what such programs say."""
    for name, script in (("nvidia-smi", H200), ("ncu", NCU), ("compute-sanitizer", SANITIZER)):
        pretend(tmp_path, name, script)
    out = tmp_path / "out"
    code, lines = ask("--out", str(out), "--only", "profile", "sanitize", "--commit", "abc", path=f"{tmp_path}:/usr/bin:/bin")
    assert code == 1 and lines[0].startswith("profile: 4 ok; ") and lines[1].startswith("sanitize: 12 ok, 4 failed; ")
    document = json.loads((out / "results.json").read_text())
    assert document["runs"][0]["machine"]["gpu"]["name"] == "NVIDIA H200"
    found = {case["name"]: case for case in document["cases"]}
    assert found["ncu of extend 16384"]["dram (%)"] == 91.5
    assert found["ncu of extend 16384"]["busy"] == {"least": 0.75, "mean": 0.85, "most": 0.975}
    assert found["racecheck of decode"]["errors"] == 1 and found["memcheck of write"]["status"] == "ok"
    report = (out / "report.md").read_text()
    assert "ncu of decode 64 x 4096: kernel paged_decode_mosaic, dram (%) 91.5" in report
    assert "| case | least busy | mean busy | most busy |" in report
    assert "| ncu of decode 64 x 4096 | 75.0% | 85.0% | 97.5% |" in report
    assert "[sanitize-0.1] RACECHECK SUMMARY: 1 hazard displayed" in (out / "log.txt").read_text()
    assert {path.name for path in out.iterdir()} == {"events.jsonl", "log.txt", "report.md", "results.json"}

    # Nothing is left to do; what failed is done again if one asks.
    pretend(tmp_path, "compute-sanitizer", "echo 'ERROR SUMMARY: 0 errors'")
    again = ("--out", str(out), "--only", "sanitize")
    assert ask(*again, path=f"{tmp_path}:/usr/bin:/bin")[0] == 1
    code, lines = ask(*again, "--again", "failed", path=f"{tmp_path}:/usr/bin:/bin")
    assert code == 0 and lines[0].startswith("sanitize: 16 ok; ")


def test_what_ended_the_last_run_is_tried_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "first")
    for section, status in (("canary", "failed"), ("decode", "failed"), ("decode", "ok")):
        log.emit("result", section=section, name=status, status=status)
    forget(log, tmp_path, [])
    assert done(read_events(tmp_path / "events.jsonl")) == {("decode", "failed"), ("decode", "ok")}
    forget(log, tmp_path, ["failed"])
    assert done(read_events(tmp_path / "events.jsonl")) == {("decode", "ok")}
    forget(log, tmp_path, ["decode"], "fail")
    assert done(read_events(tmp_path / "events.jsonl")) == {("decode", "ok")}
    forget(log, tmp_path, ["decode"])
    assert done(read_events(tmp_path / "events.jsonl")) == set()


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
