"""What happened, as it happened: a JSON object per line of one file, to which every process of every run appends.

    {"event": "run", "run": "...", "machine": {...}, ...}                  a run began
    {"event": "again", "section": "decode", "name": "..."}                 an earlier result of this case does not count as done
    {"event": "planned", "section": "decode", "names": [...]}
    {"event": "start", "section": "decode", "name": "...", "limit_s": 120} it prepares: makes inputs and compiles
    {"event": "ready", "section": "decode", "name": "...", "limit_s": 10}  it runs on the device
    {"event": "result", "section": "decode", "name": "...", "status": "ok" | "failed" | "not here" | "left out", ...}
    {"event": "gpu", ...}                                                  clocks and power, every few seconds
    {"event": "finished", "worker": "..."}

All carry `time_s`, `run` and `worker`. The file is the only memory there is: what is done, what to resume and the whole report
are functions of it. Folders are merged by appending one's lines to the other. Nothing here imports JAX.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"

Event = dict[str, Any]
CaseId = tuple[str, str]  # section, name

# The name under which it is recorded that a section could not even list its cases. It goes once they are planned.
WHOLE_SECTION = "(section)"
# A case during which so many processes ended together with all that watched them is not tried again.
MOST_UNFINISHED_STARTS = 2


class EventLog:
    """Appends to the file; each record is one write, so that several processes may do so."""

    def __init__(self, path: Path, run: str, worker: str = "") -> None:
        self._path = path
        self._common = {"run": run, "worker": worker}
        self._heal()

    def emit(self, event: str, **fields: Any) -> None:
        record = {"event": event, "time_s": round(time.time(), 3), **self._common, **fields}
        self._append(json.dumps(without_nan(record)) + "\n")

    def merge(self, other: Path) -> int:
        """Appends the lines of another folder's file that are not here yet; how many."""
        here = set(self._path.read_text().splitlines())
        new = [line for line in (other / EVENTS_FILE).read_text().splitlines() if line not in here and _parsed(line)]
        self._append("".join(line + "\n" for line in new))
        return len(new)

    def _append(self, text: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def _heal(self) -> None:
        """Half a line, left by a machine that went away, must not swallow the next one."""
        text = self._path.read_bytes() if self._path.exists() else b""
        if text and not text.endswith(b"\n"):
            self._append("\n")


class Tail:
    """Reads what was appended since the last time, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.decode(errors="replace").splitlines() if (event := _parsed(line))]


def read_events(path: Path) -> list[Event]:
    """In the order of time: a merged file is not."""
    return sorted(Tail(path).new(), key=lambda event: event["time_s"])


def _parsed(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "time_s" in event else None


def case_of(event: Event) -> CaseId:
    return event.get("section", ""), event.get("name", "")


def latest_results(events: Iterable[Event]) -> dict[CaseId, Event]:
    """Per case; one that was reached goes before one that says the time did not."""
    latest: dict[CaseId, Event] = {}
    for event in events:
        if event["event"] == "planned":
            latest.pop((event["section"], WHOLE_SECTION), None)
        elif event["event"] == "result":
            known = latest.get(case_of(event))
            if known is None or event["status"] != "left out" or known["status"] == "left out":
                latest[case_of(event)] = event
    return latest


def done(events: Iterable[Event]) -> set[CaseId]:
    """Cases that need not run: they have a result, and nobody asked for them again since."""
    found: set[CaseId] = set()
    for event in events:
        if event["event"] == "result" and event["status"] != "left out":
            found.add(case_of(event))
        elif event["event"] == "again":
            found.discard(case_of(event))
    return found


def unfinished_starts(events: Iterable[Event]) -> dict[CaseId, int]:
    """How often a case was started since its last result, or since it was asked for again."""
    counts: dict[CaseId, int] = {}
    for event in events:
        if event["event"] == "start":
            counts[case_of(event)] = counts.get(case_of(event), 0) + 1
        elif event["event"] in ("result", "again"):
            counts.pop(case_of(event), None)
    return counts


def planned(events: Iterable[Event]) -> list[CaseId]:
    """Every case that some run knew of, in the order of the plans."""
    names = {(event["section"], name): None for event in events if event["event"] == "planned" for name in event["names"]}
    return list(names)


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: their names stand for them."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
