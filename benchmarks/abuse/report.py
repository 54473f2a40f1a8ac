"""What a run says at its end: a table for people, JSON for programs, and whether it passed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from benchmarks.abuse import measures
from benchmarks.abuse.mix import Mix

_EVIDENCE_CHARS = 400
_COLUMNS = ("phase", "from_s", "requests", "calm", "whole", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms")


def make_report(mix: Mix, folder: pathlib.Path, arguments: dict[str, Any]) -> dict[str, Any]:
    records = measures.read_witness(folder / "witness.jsonl")
    growth = measures.growth(mix.measures)
    tally = mix.tally
    faults = [f"{name} ({count} times)" for name, count in tally.failures.most_common()]
    faults += measures.witness_faults(mix.measures, records) + measures.growth_faults(growth)
    return {
        "arguments": arguments,
        "rounds": mix.rounds,
        "signals": mix.kills,
        "requests": tally.requests(),
        "outcomes": {kind: dict(counts.most_common()) for kind, counts in sorted(tally.outcomes.items())},
        "meant_5xx": dict(tally.meant_5xx),
        "witness": measures.phases(mix.measures, records),
        "witness_windows": measures.windows(mix.measures, records),
        "memory": growth,
        "memory_samples": mix.measures.memory[:: max(1, len(mix.measures.memory) // 400)],
        "failures": [dataclasses.asdict(example) for example in tally.examples],
        "faults": faults,
        "passed": not faults,
    }


def as_table(report: dict[str, Any]) -> str:
    lines = [f"{report['requests']} requests in {report['rounds']} rounds, {report['signals']} signals", ""]
    lines += [
        f"  {kind:28} " + ", ".join(f"{outcome}: {count}" for outcome, count in counts.items())
        for kind, counts in report["outcomes"].items()
    ]
    lines += ["", f"5xx that were meant: {report['meant_5xx'] or 'none'}", "", "  ".join(f"{name:>11}" for name in _COLUMNS)]
    lines += ["  ".join(f"{window[name]!s:>11}" for name in _COLUMNS) for window in report["witness_windows"]]
    for phase, seen in report["witness"].items():
        lines.append("  ".join(f"{ {'phase': phase, 'from_s': 'all', **seen}[name]!s:>11}" for name in _COLUMNS))
    bounds = f"{1000 * measures.TTFT_P99_BOUND_S:g} ms, {1000 * measures.GAP_P99_BOUND_S:g} ms"
    lines += [f"bounds of the mixed phase's p99: {bounds}", "", "memory (MiB)"]
    lines += [
        f"  server {m['start']} {m['process']:12} {m['life_s']:5} s: {m['early_mb']:8} -> {m['late_mb']:8}, peak {m['peak_mb']:8}"
        f", {m['mb_per_hour']} an hour{'' if m['judged'] else ' (too short to judge)'}"
        for m in report["memory"]
    ]
    lines += ["", *(f"FAILED {fault}" for fault in report["faults"])]
    lines += [f"    {f['at_s']:7} s  {f['kind']}: {f['what']}: {f['evidence'][:_EVIDENCE_CHARS]}" for f in report["failures"]]
    return "\n".join([*lines, "", "passed" if report["passed"] else "failed"])


def write(report: dict[str, Any], folder: pathlib.Path) -> None:
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    (folder / "report.txt").write_text(as_table(report) + "\n")
