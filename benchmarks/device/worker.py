"""Runs the cases of some sections one after the other and records what happens (see events).

A worker that is started again on the same file leaves out what is done, and the case that ended the last process with it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from benchmarks.device.case import Case, NotHereError, Setting
from benchmarks.device.events import (
    EVENTS_FILE,
    MOST_UNFINISHED_STARTS,
    WHOLE_SECTION,
    EventLog,
    done,
    read_events,
    unfinished_starts,
)

EXIT_DEVICE_LOST = 3
OUR_PACKAGES = ("benchmarks", "jaxserve")
_PR_SET_PDEATHSIG = 1


class Worker:
    def __init__(self, events: Path, log: EventLog, setting: Setting, deadline_s: float) -> None:
        self._log = log
        self._setting = setting
        self._deadline_s = deadline_s
        earlier = read_events(events)
        self._done = done(earlier)
        self._unfinished = unfinished_starts(earlier)

    def run_section(self, section: str, module: str, shard: int, shards: int, match: str) -> None:
        try:
            cases: list[Case] = importlib.import_module(module).cases(self._setting)
        except Exception as error:
            self._result(section, WHOLE_SECTION, **_problem(error))
            return
        cases = [case for case in cases if re.search(match, case.name)][shard::shards]
        self._log.emit("planned", section=section, names=[case.name for case in cases])
        for case in cases:
            case_id = (section, case.name)
            if case_id in self._done:
                continue
            if time.time() > self._deadline_s:
                self._result(section, case.name, status="left out", reason="the time was used up")
            elif self._unfinished.get(case_id, 0) >= MOST_UNFINISHED_STARTS:
                self._result(section, case.name, status="failed", reason=f"{MOST_UNFINISHED_STARTS} runs ended while it ran")
            else:
                self._run_case(section, case)

    def _run_case(self, section: str, case: Case) -> None:
        started_s = time.monotonic()
        times = {}
        self._log.emit("start", section=section, name=case.name, limit_s=case.prepare_limit_s * self._setting.patience)
        try:
            measure = case.prepare()
            times["prepare_s"] = round(time.monotonic() - started_s, 2)
            self._log.emit("ready", section=section, name=case.name, limit_s=case.limit_s * self._setting.patience)
            result = {"status": "ok", **measure()}
        except Exception as error:
            result = _problem(error)
        self._result(section, case.name, **result, **times, wall_s=round(time.monotonic() - started_s, 2))
        if result["status"] == "failed":
            self._setting.recover()
            if not _device_answers():
                raise SystemExit(EXIT_DEVICE_LOST)

    def _result(self, section: str, name: str, **fields: Any) -> None:
        self._log.emit("result", section=section, name=name, **fields)


def _problem(error: Exception) -> dict[str, Any]:
    """Status and reason. A package that is not installed is no failure of ours, unless it is ours."""
    if isinstance(error, NotHereError):
        return {"status": "not here", "reason": str(error)}
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in OUR_PACKAGES:
        return {"status": "not here", "reason": f"{error.name} is not installed"}
    return {"status": "failed", "reason": _reason(error), "trace": traceback.format_exc()[-2000:]}


def _reason(error: Exception) -> str:
    """The first line, and the last where it is another: errors out of callbacks say there what happened."""
    lines = str(error).strip().splitlines() or ["no message"]
    last = f" ... {lines[-1][:300]}" if len(lines) > 1 else ""
    return f"{type(error).__name__}: {lines[0][:300]}{last}"


def _device_answers() -> bool:
    """Whether the device still computes: after an illegal access nothing does until the process is a new one."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.ones(8, device="cuda").sum().item()
        elif jax is not None:
            jax.numpy.ones(8).sum().block_until_ready()
    except Exception:
        return False
    return True


def _end_with(parent: int) -> None:
    """A worker does not outlive the process that watches it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the supervisor has gone")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", nargs="+", required=True, metavar="NAME=MODULE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--deadline-s", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--match", default="")
    parser.add_argument("--shape", default="")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    _end_with(options.parent)
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the kernels we compare with
    events = options.out / EVENTS_FILE
    log = EventLog(events, options.run, options.name)
    worker = Worker(events, log, Setting(options.smoke, options.out, options.shape), options.deadline_s)
    for section in options.sections:
        worker.run_section(*section.split("="), options.shard, options.shards, options.match)
    log.emit("finished")


if __name__ == "__main__":
    main()
