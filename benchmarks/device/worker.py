"""Runs the cases of some sections one after the other and writes what happens to a file, a JSON object per line.

    {"event": "planned", "section": "decode", "names": [...]}
    {"event": "start", "section": "decode", "name": "...", "limit_s": 60, "time_s": ...}
    {"event": "result", "section": "decode", "name": "...", "status": "ok" | "failed" | "not here" | "left out", ...}
    {"event": "finished"}

A worker that is started again on the same file leaves out what was started before: the case that ended the last process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from benchmarks.device.case import SECTIONS, Case, NotHereError, Setting

EXIT_DEVICE_LOST = 3


def read_events(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the writer may be in the middle of one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Worker:
    def __init__(self, events: Path, setting: Setting, deadline_s: float) -> None:
        self._path = events
        self._setting = setting
        self._deadline_s = deadline_s
        self._started = {(event["section"], event["name"]) for event in read_events(events) if event["event"] == "start"}

    def run_section(self, section: str, shard: int, shards: int) -> None:
        try:
            cases: list[Case] = importlib.import_module(SECTIONS[section]).cases(self._setting)
        except Exception as error:
            self._emit("result", section, "(section)", status="failed", reason=_reason(error))
            return
        cases = cases[shard::shards]
        self._emit("planned", section, "", names=[case.name for case in cases])
        for case in cases:
            if (section, case.name) in self._started:
                continue
            if time.time() > self._deadline_s:
                self._emit("result", section, case.name, status="left out", reason="the time was used up")
                continue
            self._run_case(section, case)

    def _run_case(self, section: str, case: Case) -> None:
        self._emit("start", section, case.name, limit_s=case.limit_s)
        started_s = time.monotonic()
        try:
            result = {"status": "ok", **case.run()}
        except NotHereError as error:
            result = {"status": "not here", "reason": str(error)}
        except Exception as error:
            result = {"status": "failed", "reason": _reason(error), "trace": traceback.format_exc()[-2000:]}
        self._emit("result", section, case.name, **result, wall_s=round(time.monotonic() - started_s, 2))
        if result["status"] == "failed":
            self._setting.recover()
            if not _device_answers(section):
                raise SystemExit(EXIT_DEVICE_LOST)

    def finish(self) -> None:
        self._emit("finished", "", "")

    def _emit(self, event: str, section: str, name: str, **more: Any) -> None:
        record = {"event": event, "section": section, "name": name, "time_s": time.time(), **more}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _reason(error: Exception) -> str:
    """The first line, and the last where it is another: errors out of callbacks say there what happened."""
    lines = str(error).strip().splitlines() or ["no message"]
    last = f" ... {lines[-1][:300]}" if len(lines) > 1 else ""
    return f"{type(error).__name__}: {lines[0][:300]}{last}"


def _device_answers(section: str) -> bool:
    """Whether the device still computes: after an illegal access nothing does until the process is a new one."""
    try:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.ones(8, device="cuda").sum().item()
        if section != "torch":  # which has not started JAX's device
            import jax.numpy as jnp

            jnp.ones(8).sum().block_until_ready()
    except Exception:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", nargs="+", required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--deadline-s", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the kernels we compare with
    worker = Worker(options.events, Setting(options.smoke), options.deadline_s)
    for section in options.sections:
        worker.run_section(section, options.shard, options.shards)
    worker.finish()


if __name__ == "__main__":
    main()
