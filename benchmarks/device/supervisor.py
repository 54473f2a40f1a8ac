"""Starts workers, watches them, and ends the ones that hang.

A kernel that was never on hardware may hang, or read what it must not and take the CUDA context with it. So each group of
sections runs in a process that can be ended; what ended it is recorded as the result of the case that ran, and a new process
goes on behind it. Nothing is kept here that is not in the events.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device.events import EVENTS_FILE, WHOLE_SECTION, Event, EventLog, Tail, latest_results, read_events
from benchmarks.device.sections import Section, grouped, share_of_rest

LOG_FILE = "log.txt"
START_LIMIT_S = 120.0  # importing JAX and torch, finding the device, listing cases
END_LIMIT_S = 10.0  # after SIGKILL; a process in the driver's hands may not end
GRACE_S = 5.0  # a case may run so far past the end of the whole budget
POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Run:
    """What all workers of a run have in common."""

    out: Path
    name: str
    end_s: float  # seconds since the epoch
    smoke: bool = False
    match: str = ""  # a regular expression: the cases to run, those of gates aside
    shape: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)  # beside this process's own
    start_limit_s: float = START_LIMIT_S

    @property
    def events(self) -> Path:
        return self.out / EVENTS_FILE

    def log(self, worker: str = "") -> EventLog:
        return EventLog(self.events, self.name, worker)


class WorkerProcess:
    """One worker of a group, started anew while it makes progress."""

    def __init__(self, run: Run, sections: Sequence[Section], shard: int, shards: int, deadline_s: float) -> None:
        self._run = run
        self._sections = sections
        self._shard, self._shards = shard, shards
        self._deadline_s = deadline_s
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self.name = f"{self._sections[0].group}-{self._shard}.{self._starts}"
        self._log = self._run.log(self.name)
        command = [sys.executable, "-m", "benchmarks.device.worker", "--out", str(self._run.out), "--run", self._run.name]
        command += ["--sections", *(f"{section.name}={section.module}" for section in self._sections)]
        command += ["--name", self.name, "--deadline-s", str(self._deadline_s), "--parent", str(os.getpid())]
        command += ["--shard", str(self._shard), "--shards", str(self._shards), f"--shape={self._run.shape}"]
        command += ["--smoke"] if self._run.smoke else []
        command += [] if any(section.is_gate for section in self._sections) else [f"--match={self._run.match}"]
        self._last_s, self._latest, self._progress = time.time(), None, 0
        self._running: Event | None = None
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self._run.environment},
        )
        self._lines: collections.deque[str] = collections.deque(maxlen=5)
        self._copier = threading.Thread(target=self._copy_output, args=(self.name, self._process, self._lines), daemon=True)
        self._copier.start()

    def _copy_output(self, name: str, process: subprocess.Popen[bytes], lines: collections.deque[str]) -> None:
        assert process.stdout is not None
        with (self._run.out / LOG_FILE).open("a") as log:
            for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                lines.append(text[-300:])
                log.write(f"[{name}] {text}\n")
                log.flush()

    def take(self, event: Event) -> None:
        """An event of this worker."""
        self._latest, self._last_s = event["event"], event["time_s"]
        if event["event"] in ("start", "ready"):
            self._running = event
        elif event["event"] == "result":
            self._running, self._progress = None, self._progress + 1

    def poll(self, read: Callable[[], None]) -> bool:
        """Looks after the process; True when nothing is left to do. `read` brings `take` up to date."""
        ended = self._process.poll() is not None
        read()
        if not ended:
            overdue = self._overdue()
            if overdue is None:
                return False
            if not self.end():
                overdue = (overdue[0], f"{overdue[1]}, and its process could not be ended")
                self._deadline_s = 0.0  # whoever came next would wait for the device
            read()  # a result may have come meanwhile
            self._close_case(*overdue)
        elif self._latest == "finished":
            return True
        else:
            self._copier.join(timeout=1)
            self._close_case("failed", f"its process ended with exit code {self._process.returncode}: {self._last_words()}")
        return not self._restart()

    def _overdue(self) -> tuple[str, str] | None:
        """Status and reason for what runs."""
        now_s, running = time.time(), self._running
        if now_s > self._run.end_s + GRACE_S:
            return "left out", "the time was used up while it ran"
        if running is None:
            too_long = now_s - self._last_s > self._run.start_limit_s
            return ("failed", f"its worker did nothing for {self._run.start_limit_s:.0f} s") if too_long else None
        if now_s - running["time_s"] <= running["limit_s"]:
            return None
        what = "it hung" if running["event"] == "ready" else "preparing it took too long"
        return "failed", f"{what}: ended after {running['limit_s']:.0f} s"

    def _close_case(self, status: str, reason: str) -> None:
        """The result of what ran; of the section, if nothing had begun."""
        running, self._running = self._running, None
        if running is not None:
            self._log.emit("result", section=running["section"], name=running["name"], status=status, reason=reason)
            self._progress += 1
        elif not self._progress:
            for section in self._sections:
                self._log.emit("result", section=section.name, name=WHOLE_SECTION, status=status, reason=reason)

    def _restart(self) -> bool:
        if not self._progress or time.time() > self._deadline_s:
            return False
        self._start()
        return True

    def end(self) -> bool:
        """Whether it did."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _last_words(self) -> str:
        return next((line for line in reversed(self._lines) if line.strip()), "no output")


def run_sections(sections: Sequence[Section], run: Run, report: Callable[[], None]) -> str | None:
    """Runs what is not done. A sentence if it was stopped early. `report` is called whenever a group is through."""
    groups = grouped(_together(sections) if run.smoke else sections)
    for index, group in enumerate(groups):
        deadline_s = _deadline_s(groups[index:], run)
        started_s = time.time()
        shards = 1 if run.smoke else max(section.workers for section in group)
        _watch([WorkerProcess(run, group, shard, shards, deadline_s) for shard in range(shards)], run)
        report()
        _say(group, run, time.time() - started_s)
        problem = _failed_gate(group, run)
        if problem is not None:
            return problem
    return None


def _deadline_s(groups: Sequence[Sequence[Section]], run: Run) -> float:
    """When the first group starts no more cases. A gate takes what it needs: behind one that is not through nothing runs."""
    if any(section.is_gate for section in groups[0]):
        return run.end_s
    return time.time() + max(run.end_s - time.time(), 0.0) * share_of_rest(groups)


def _together(sections: Sequence[Section]) -> list[Section]:
    """In a smoke run nothing is timed, and importing JAX takes longer than most cases."""
    return [section if section.is_gate else dataclasses.replace(section, process="smoke") for section in sections]


def _watch(workers: Sequence[WorkerProcess], run: Run) -> None:
    tail, waiting = Tail(run.events), list(workers)

    def read() -> None:
        for event in tail.new():
            for worker in workers:
                if event["run"] == run.name and event["worker"] == worker.name:
                    worker.take(event)

    try:
        while waiting:
            time.sleep(POLL_S)
            waiting = [worker for worker in waiting if not worker.poll(read)]
    finally:
        for worker in waiting:
            worker.end()


def _results(group: Sequence[Section], run: Run) -> list[dict[str, Any]]:
    names = {section.name for section in group}
    return [result for (section, _), result in latest_results(read_events(run.events)).items() if section in names]


def _say(group: Sequence[Section], run: Run, seconds: float) -> None:
    statuses = collections.Counter(result["status"] for result in _results(group, run))
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    print(f"{', '.join(section.name for section in group)}: {counts or 'nothing'}; {seconds:.0f} s", flush=True)


def _failed_gate(group: Sequence[Section], run: Run) -> str | None:
    if not any(section.is_gate for section in group):
        return None
    bad = [result for result in _results(group, run) if result["status"] in ("failed", "left out")]
    names: dict[str, list[str]] = {}
    for result in sorted(bad, key=lambda result: result["name"]):
        names.setdefault(result["reason"], []).append(result["name"])
    reasons = sorted(names.items(), key=lambda item: len(item[1]))  # what only one case says tells more
    return "; ".join(f"{', '.join(cases)}: {reason}" for reason, cases in reasons) or None
