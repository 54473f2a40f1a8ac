"""Reads a trace as JAX's profiler and Perfetto have it: the JSON of Chrome's trace viewer, usually gzipped.

Of its threads one is the scheduler's, which launches steps. What counts as device: the streams of a GPU, the ops of a TPU, and
on a CPU the threads in which XLA computes.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAUNCH = "launch "
# Lines of a device that repeat what its ops say, or span the time between them.
_DERIVED = ("Steps", "XLA Modules", "XLA TraceMe", "Framework", "Source", "Launch Stats")
_CPU_THREADS = ("tf_XLA",)
# In those threads, what is no work.
_WAITING = ("wait for completion", "ThreadpoolListener", "end: ")


class TraceFileError(Exception):
    """Not a trace, or not one of a server's steps; one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    name: str
    begin_us: float
    end_us: float
    args: dict[str, Any]

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


@dataclasses.dataclass(frozen=True)
class Trace:
    path: Path
    host: list[Event]  # of the scheduler's thread, by begin
    device: list[Event]  # of all devices, by begin
    num_devices: int
    others: list[list[Event]] = dataclasses.field(default_factory=list)  # of the host's other threads, each by begin

    @property
    def launches(self) -> list[Event]:
        return [event for event in self.host if event.name.startswith(LAUNCH)]


def read_trace(path: str) -> Trace:
    """A file, or the newest in a folder and the folders below. Raises TraceFileError."""
    file = _file_of(Path(path))
    names: dict[Any, str] = {}  # of threads, by process and thread
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], list[Event]] = {}
    try:
        for event in _events(file):
            thread = event.get("pid"), event.get("tid")
            if event.get("ph") == "X":
                threads.setdefault(thread, []).append(_event(event))
            elif event.get("ph") == "M" and event.get("name") == "thread_name":
                names[thread] = str(event["args"]["name"])
            elif event.get("ph") == "M" and event.get("name") == "process_name":
                processes[event.get("pid")] = str(event["args"]["name"])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceFileError(f"{file} is no trace: it must be JSON with traceEvents.") from error
    host = next((found for found in threads.values() if any(_is_launch(event) for event in found)), None)
    if host is None:
        raise TraceFileError(
            f"{file} has no steps: no launch stands in it, as /start_profile of a jaxserve server writes them."
        )
    accelerators = {pid for pid, name in processes.items() if name.startswith("/device:") and "CUSTOM" not in name}
    device = [
        event
        for key, found in threads.items()
        if (_on_accelerator(names.get(key, "")) if key[0] in accelerators else not accelerators and _on_cpu(names.get(key, "")))
        for event in found
        if not any(word in event.name for word in _WAITING)
    ]
    others = [
        _by_begin(found)
        for key, found in threads.items()
        if found is not host and key[0] not in accelerators and not _on_cpu(names.get(key, ""))
    ]
    return Trace(file, _by_begin(host), _by_begin(device), max(len(accelerators), 1), others)


def _file_of(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".pb":
            return _file_of(path.parent)  # what is the same beside it, as JSON
        return path
    if not path.is_dir():
        raise TraceFileError(f"{path} does not exist.")
    found = sorted(path.rglob("*trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise TraceFileError(f"{path} has no *.trace.json.gz.")
    return found[-1]


def _events(file: Path) -> list[dict[str, Any]]:
    try:
        data = file.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = content["traceEvents"] if isinstance(content, dict) else content
        return [event for event in events if isinstance(event, dict)]
    except (OSError, EOFError, zlib.error) as error:
        raise TraceFileError(f"{file} cannot be read: {error}") from error


def _event(event: dict[str, Any]) -> Event:
    begin = float(event["ts"])
    return Event(str(event["name"]), begin, begin + float(event.get("dur", 0)), event.get("args") or {})


def _is_launch(event: Event) -> bool:
    return event.name.startswith(LAUNCH) and "step_num" in event.args


def _on_accelerator(thread: str) -> bool:
    return not thread.startswith(_DERIVED)


def _on_cpu(thread: str) -> bool:
    return thread.startswith(_CPU_THREADS)


def _by_begin(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.begin_us, -event.end_us))


def stages(trace: Trace) -> Iterator[Event]:
    """What the scheduler says that it does, in turn. Its names begin with a small letter, XLA's with a large one."""
    end = float("-inf")
    for event in trace.host:
        if event.begin_us >= end and event.name[:1].islower():
            yield event
            end = event.end_us
