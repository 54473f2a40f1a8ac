"""What was measured while others abused the server: the witness's waits and the processes' memory, and how both are judged.

Waits in the time of a disturbance (an operator's pause, a stopped or killed process) are left out: everybody waited then,
because it was asked for. The bounds are for a machine of two cores on which the abuse itself runs as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import time
from collections.abc import Iterable
from typing import Any

TTFT_P99_BOUND_S = 5.0
GAP_P99_BOUND_S = 1.0
GROWTH_BOUND_MB = 96.0  # of a process, from the second quarter of a server's life to its last
_MIN_LIFE_S = 240.0  # shorter lives say nothing about memory: caches are still filling
_WINDOW_S = 60.0
_MARGIN_S = 0.3

Record = dict[str, Any]


@dataclasses.dataclass
class Measures:
    """marks: when each phase began. memory: time, number of the server's start, MiB by process."""

    marks: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    disturbances: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int, dict[str, float]]] = dataclasses.field(default_factory=list)

    def mark(self, phase: str) -> None:
        self.marks.append((phase, time.time()))

    def disturbed(self, start_s: float, end_s: float) -> bool:
        return any(start_s < end + _MARGIN_S and begin - _MARGIN_S < end_s for begin, end in self.disturbances)


def read_witness(path: pathlib.Path) -> list[Record]:
    """All whole lines: the last one may have been cut when the witness was ended."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def windows(measures: Measures, records: list[Record]) -> list[Record]:
    """Of each minute (and of each phase's rest): what the witness saw of it."""
    found = []
    ends = [start_s for _, start_s in measures.marks[1:]]
    for (phase, start_s), end_s in zip(measures.marks, ends, strict=False):
        for number in range(max(1, round((end_s - start_s) / _WINDOW_S))):
            begin = start_s + number * _WINDOW_S
            last = end_s if end_s - begin < 1.5 * _WINDOW_S else begin + _WINDOW_S
            inside = [record for record in records if begin <= record["at_s"] < last]
            found.append({"phase": phase, "from_s": round(begin - measures.marks[0][1]), **_seen(measures, inside)})
    return found


def phases(measures: Measures, records: list[Record]) -> dict[str, Record]:
    ends = [start_s for _, start_s in measures.marks[1:]]
    return {
        phase: _seen(measures, [record for record in records if start_s <= record["at_s"] < end_s])
        for (phase, start_s), end_s in zip(measures.marks, ends, strict=False)
    }


def _seen(measures: Measures, records: list[Record]) -> Record:
    calm = [record for record in records if not measures.disturbed(record["at_s"], record["ended_s"])]
    ttfts = [record["ttft_s"] for record in calm if record["ttft_s"] is not None]
    gaps = [gap for record in calm for gap in record["gaps_s"]]
    return {
        "requests": len(records),
        "calm": len(calm),
        "whole": sum(record["ok"] for record in calm),
        "ttft_p50_ms": _ms(percentile(ttfts, 50)),
        "ttft_p99_ms": _ms(percentile(ttfts, 99)),
        "gap_p50_ms": _ms(percentile(gaps, 50)),
        "gap_p99_ms": _ms(percentile(gaps, 99)),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def percentile(values: Iterable[float], percent: float) -> float | None:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else None


def witness_faults(measures: Measures, records: list[Record]) -> list[str]:
    """What the witness suffered that it should not have. A refusal because the queue is full is an answer."""
    faults = []
    for record in records:
        if record["ok"] or measures.disturbed(record["at_s"], record["ended_s"]) or record["outcome"].startswith("503 "):
            continue
        faults.append(f"the witness's {record['kind']} at {record['at_s']:.1f}: {record['outcome']}")
    seen = phases(measures, records).get("mixed", {})
    for name, bound_s in (("ttft_p99_ms", TTFT_P99_BOUND_S), ("gap_p99_ms", GAP_P99_BOUND_S)):
        if (value := seen.get(name)) is not None and value > 1000 * bound_s:
            faults.append(f"the witness's {name} beside the abuse is {value:g}; at most {1000 * bound_s:g}")
    return faults


def growth(measures: Measures) -> list[Record]:
    """Of each process of each server: median MiB in the second and in the last quarter of its life, and the slope of a line
    through all after the first quarter."""
    found = []
    for start in sorted({start for _, start, _ in measures.memory}):
        samples = [(at_s, sizes) for at_s, number, sizes in measures.memory if number == start]
        life_s = samples[-1][0] - samples[0][0]
        for name in ("main", "scheduler", "detokenizer"):
            series = [(at_s, sizes[name]) for at_s, sizes in samples if name in sizes]
            if len(series) < 8:
                continue
            quarter = len(series) // 4
            later = series[quarter:]
            slope = statistics.linear_regression([at_s for at_s, _ in later], [size for _, size in later]).slope
            early = statistics.median(size for _, size in series[quarter : 2 * quarter])
            late = statistics.median(size for _, size in series[-quarter:])
            found.append(
                {
                    "start": start,
                    "process": name,
                    "life_s": round(life_s),
                    "early_mb": round(early, 1),
                    "late_mb": round(late, 1),
                    "peak_mb": max(size for _, size in series),
                    "mb_per_hour": round(3600 * slope, 1),
                    "judged": life_s >= _MIN_LIFE_S,
                }
            )
    return found


def growth_faults(found: list[Record]) -> list[str]:
    return [
        f"{record['process']} grew from {record['early_mb']:.0f} to {record['late_mb']:.0f} MiB; bound: {GROWTH_BOUND_MB:g}"
        for record in found
        if record["judged"] and record["late_mb"] - record["early_mb"] > GROWTH_BOUND_MB
    ]
