"""Starts workers, watches them, and collects what they measured.

A kernel that was never on hardware may hang, or read what it must not and take the CUDA context with it. So each section runs
in a process that can be ended; what ended it is recorded as failed and a new process goes on behind it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.device.worker import read_events

START_LIMIT_S = 90.0  # importing JAX and torch, finding the device, listing cases
GRACE_S = 8.0  # a case may run so far past the end of the whole budget
POLL_S = 0.1
MOST_RESTARTS = 12
MOST_HANGS = 3  # each costs a case's whole time limit
# Check workers share the device: checks are compiled more than they run, and nothing is timed.
CHECK_WORKERS = 8
# Sections that share a process: importing JAX and finding the device takes seconds.
TOGETHER = (("ceilings",), ("checks",), ("decode", "extend", "mla", "write"), ("model",), ("jax",), ("torch",))


@dataclasses.dataclass(frozen=True)
class Budget:
    start_s: float  # time.time()
    total_s: float
    # Sections may not take more than this share of the total, so that a slow one leaves the others their turn.
    shares: dict[str, float] = dataclasses.field(
        default_factory=lambda: {
            "ceilings": 0.1,
            "checks": 0.27,
            "decode": 0.22,
            "extend": 0.12,
            "mla": 0.1,
            "write": 0.06,
            "model": 0.3,
            "jax": 0.15,
            "torch": 0.3,
        }
    )

    @property
    def end_s(self) -> float:
        return self.start_s + self.total_s

    def deadline_s(self, sections: list[str]) -> float:
        """No new case is taken after this."""
        share = sum(self.shares[section] for section in sections)
        return min(self.end_s, time.time() + share * self.total_s)


class WorkerProcess:
    """One worker, started anew while it makes progress."""

    def __init__(self, sections: list[str], folder: Path, budget: Budget, shard: int, shards: int, smoke: bool) -> None:
        name = f"{sections[0]}-{shard}"
        self.events_path = folder / f"{name}.jsonl"
        self._log_path = folder / f"{name}.log"
        self._sections = sections
        self._budget = budget
        self._deadline_s = budget.deadline_s(sections)
        self._arguments = ["--shard", str(shard), "--shards", str(shards), *(["--smoke"] if smoke else [])]
        self._smoke = smoke
        self._failures: list[dict[str, Any]] = []
        self._restarts = self._hangs = 0
        self._started_before = 0
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.device.worker", "--sections", *self._sections]
        command += ["--events", str(self.events_path), "--deadline-s", str(self._deadline_s), *self._arguments]
        self._started_s = time.time()
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=_environment(self._smoke)
            )

    def poll(self) -> bool:
        """Looks after the process; True when nothing is left to do."""
        events = read_events(self.events_path)
        code = self._process.poll()
        if code is None:
            reason = self._overdue(events)
            if reason is None:
                return False
            self._end()
            self._hangs += 1
            self._note(read_events(self.events_path), reason)
        elif events and events[-1]["event"] == "finished":
            return True
        else:
            self._note(events, f"its process ended with exit code {code}: {self._last_line()}")
        return not self._may_restart()

    def results(self) -> list[dict[str, Any]]:
        """One per case: from the worker, else what ended it, else that it was never reached."""
        events = read_events(self.events_path)
        results = [event for event in events if event["event"] == "result"] + self._failures
        known = {(result["section"], result["name"]) for result in results}
        for event in events:
            for name in event.get("names", []) if event["event"] == "planned" else []:
                if (event["section"], name) not in known:
                    known.add((event["section"], name))
                    left_out = {"status": "left out", "reason": "its worker was ended before"}
                    results.append({"section": event["section"], "name": name, **left_out})
        if not any(event["event"] == "planned" for event in events) and not results:
            reason = f"the worker did not start: {self._last_line()}"
            results = [{"section": name, "name": "(section)", "status": "failed", "reason": reason} for name in self._sections]
        return results

    def _overdue(self, events: list[dict[str, Any]]) -> str | None:
        now_s, running = time.time(), _running(events)
        if now_s > self._budget.end_s + GRACE_S:
            return "the time was used up while it ran"
        if running is not None and now_s - running["time_s"] > running["limit_s"]:
            return f"it hung: ended after {running['limit_s']:.0f} s"
        latest_s = max([self._started_s, *(event["time_s"] for event in events[-1:])])
        if running is None and now_s - latest_s > START_LIMIT_S:
            return "its worker did nothing"
        return None

    def _note(self, events: list[dict[str, Any]], reason: str) -> None:
        running = _running(events)
        if running is not None:
            failure = {"section": running["section"], "name": running["name"], "status": "failed", "reason": reason}
            self._failures.append(failure)

    def _may_restart(self) -> bool:
        started = sum(event["event"] == "start" for event in read_events(self.events_path))
        made_progress = started > self._started_before
        is_hopeless = not made_progress or self._restarts >= MOST_RESTARTS or self._hangs >= MOST_HANGS
        if is_hopeless or time.time() > self._deadline_s:
            return False
        self._started_before = started
        self._restarts += 1
        with self.events_path.open("a") as file:
            file.write(json.dumps({"event": "restarted", "time_s": time.time()}) + "\n")
        self._start()
        return True

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_line(self) -> str:
        lines = [line for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "no output"


def _running(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The case that was started and has not ended."""
    last = next((event for event in reversed(events) if event["event"] != "planned"), None)
    return last if last is not None and last["event"] == "start" else None


def _environment(smoke: bool) -> dict[str, str]:
    """JAX and torch share the device, so JAX takes memory as it needs it."""
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if smoke:  # its time is XLA's, compiling what runs once
        variables["JAX_PLATFORMS"] = "cpu"
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    return {**os.environ, **variables}


def run_sections(sections: list[str], folder: Path, budget: Budget, *, smoke: bool) -> list[dict[str, Any]]:
    """Results of all cases. Groups of sections run one after the other; a smoke run puts all into one process."""
    if smoke:
        return _watch([WorkerProcess(sections, folder, budget, 0, 1, smoke)])
    results = []
    for group in TOGETHER:
        wanted = [section for section in group if section in sections]
        if not wanted:
            continue
        shards = CHECK_WORKERS if wanted == ["checks"] else 1
        started_s = time.time()
        found = _watch([WorkerProcess(wanted, folder, budget, shard, shards, smoke) for shard in range(shards)])
        results += found
        ok = sum(result["status"] == "ok" for result in found)
        print(f"{', '.join(wanted)}: {ok} of {len(found)} cases ran, {time.time() - started_s:.0f} s", flush=True)
    return results


def _watch(workers: list[WorkerProcess]) -> list[dict[str, Any]]:
    waiting = list(workers)
    while waiting:
        time.sleep(POLL_S)
        waiting = [worker for worker in waiting if not worker.poll()]
    return [result for worker in workers for result in worker.results()]
