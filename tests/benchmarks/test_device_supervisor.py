"""The device benchmark on made-up cases that need no JAX: what breaks, hangs or is killed costs its own case only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_up_cases import ran

from benchmarks.device.events import EventLog, done, latest_results, read_events
from benchmarks.device.report import summary
from benchmarks.device.sections import SECTIONS, Section, grouped, share_of_rest
from benchmarks.device.supervisor import Run, run_sections

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MADE_UP = Section("made-up", "made_up_cases", 1)


def make_run(out: Path, budget_s: float = 60, **fields: Any) -> Run:
    path = os.pathsep.join((str(ROOT), str(HERE)))
    return Run(out, f"run{time.time()}", time.time() + budget_s, environment={"PYTHONPATH": path}, **fields)


def nothing() -> None:
    pass


def statuses(out: Path) -> dict[str, str]:
    return {result["name"]: result["status"] for result in summary(read_events(out / "events.jsonl"))["cases"]}


def test_each_break_costs_one_case(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run_sections([MADE_UP], run, nothing) is None
    assert statuses(tmp_path) == {
        "good": "ok", "absent": "not here", "without a package": "not here", "hang": "failed", "long compilation": "ok",
        "endless compilation": "failed",
        "crash": "failed", "raise": "failed", "last": "ok",
    }  # fmt: skip
    results = {result["name"]: result for result in latest_results(read_events(run.events)).values()}
    assert results["hang"]["reason"] == "it hung: ended after 0 s"
    assert results["endless compilation"]["reason"].startswith("preparing it took too long")
    assert results["without a package"]["reason"] == "no_such_package is not installed"
    assert "exit code 7" in results["crash"]["reason"]
    assert results["raise"]["reason"].startswith("ZeroDivisionError")
    assert results["long compilation"]["prepare_s"] >= 1  # reported beside the time, and no hang
    document = summary(read_events(run.events))
    assert {one["name"]: one.get("theirs_over_ours") for one in document["cases"]}["last"] == 2.0

    # Another run on the folder has nothing to do; asked for again, a case runs again.
    assert run_sections([MADE_UP], make_run(tmp_path), nothing) is None
    assert ran(tmp_path) == ["good", "last"]
    run.log().emit("again", section="made-up", name="good")
    assert run_sections([MADE_UP], make_run(tmp_path), nothing) is None
    assert ran(tmp_path) == ["good", "last", "good"]


def test_a_killed_run_loses_only_the_case_it_was_in(tmp_path: Path) -> None:
    """The whole run is killed as a machine that goes away would: nobody can write last words."""
    script = (
        "import sys, time, pathlib\n"
        "from test_device_supervisor import *\n"
        "run_sections([MADE_UP], make_run(pathlib.Path(sys.argv[1])), nothing)\n"
    )
    environment = {**os.environ, "MADE_UP": "slow", "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))}
    command = [sys.executable, "-c", script, str(tmp_path)]
    for _ in range(2):
        with subprocess.Popen(command, env=environment) as process:
            before = len(starts_of(tmp_path, "slow"))
            wait_for(lambda before=before: len(starts_of(tmp_path, "slow")) > before)
            process.send_signal(signal.SIGKILL)
    worker = max(event["worker"] for event in starts_of(tmp_path, "slow"))
    wait_for(lambda: worker not in subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout)
    assert statuses(tmp_path) == {"first": "ok", "slow": "left out", "last": "left out"}

    # Half a line may be what a machine leaves behind.
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "result", "sec')
    # The third try would be one too many for what ended two runs; the rest goes on.
    done_ = subprocess.run(command, env=environment, timeout=60, check=False)
    assert done_.returncode == 0
    assert statuses(tmp_path) == {"first": "ok", "slow": "failed", "last": "ok"}
    assert ran(tmp_path) == ["first", "last"]


def starts_of(out: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(out / "events.jsonl") if event["event"] == "start" and event["name"] == name]


def wait_for(condition: Any, limit_s: float = 30) -> None:
    end_s = time.time() + limit_s
    while not condition():
        assert time.time() < end_s, "it did not happen"
        time.sleep(0.05)


def test_what_the_time_does_not_reach_runs_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP", "slow")
    run = make_run(tmp_path, budget_s=-1)
    run_sections([MADE_UP], run, nothing)
    assert statuses(tmp_path) == dict.fromkeys(("first", "slow", "last"), "left out")
    (tmp_path / "go").touch()
    run_sections([MADE_UP], make_run(tmp_path), nothing)
    assert statuses(tmp_path) == dict.fromkeys(("first", "slow", "last"), "ok")


def test_a_case_that_the_end_finds_running_is_ended_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP", "slow")
    monkeypatch.setattr("benchmarks.device.supervisor.GRACE_S", 0.0)
    run_sections([MADE_UP], make_run(tmp_path, budget_s=1.5), nothing)
    assert statuses(tmp_path)["first"] == "ok" and statuses(tmp_path)["slow"] == "left out"
    (tmp_path / "go").touch()
    run_sections([MADE_UP], make_run(tmp_path), nothing)
    assert set(statuses(tmp_path).values()) == {"ok"}
    assert ran(tmp_path) == ["first", "last"]


def test_a_failed_gate_ends_the_run(tmp_path: Path) -> None:
    gate = Section("canary", "made_up_cases", 1, is_gate=True)
    problem = run_sections([gate, MADE_UP], make_run(tmp_path), nothing)
    assert problem is not None and "hang: it hung" in problem and "crash: its process ended" in problem
    assert {section for section, _ in done(read_events(tmp_path / "events.jsonl"))} == {"canary"}


def test_a_section_that_cannot_be_imported_says_so_until_it_can(tmp_path: Path) -> None:
    run_sections([Section("made-up", "benchmarks.device.no_such_module", 1)], make_run(tmp_path), nothing)
    assert statuses(tmp_path) == {"(section)": "failed"}
    run_sections([MADE_UP], make_run(tmp_path), nothing)
    assert "(section)" not in statuses(tmp_path) and statuses(tmp_path)["good"] == "ok"


def test_folders_merge(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, name in ((here, "a"), (there, "b")):
        folder.mkdir()
        log = EventLog(folder / "events.jsonl", name)
        log.emit("result", section="decode", name=name, status="ok", us=1.0)
    log = EventLog(here / "events.jsonl", "merge")
    assert log.merge(there) == 1 and log.merge(there) == 0
    assert done(read_events(here / "events.jsonl")) == {("decode", "a"), ("decode", "b")}


def test_shares_of_time_are_of_what_is_left() -> None:
    groups = grouped(SECTIONS)
    assert [section.name for group in groups for section in group] == [section.name for section in SECTIONS]
    left = 1.0
    for index in range(len(groups)):
        left -= left * share_of_rest(groups[index:])
        assert left > -1e-9
    assert left == pytest.approx(0)  # all of it, if each takes its share
    assert share_of_rest(groups[-1:]) == 1
