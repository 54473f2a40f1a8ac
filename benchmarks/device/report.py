"""The report: one Markdown file and one JSON file, both functions of the events and of nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.device.events import EVENTS_FILE, Event, case_of, latest_results, planned, read_events
from benchmarks.device.predictions import PREDICTIONS, Prediction
from benchmarks.device.rates import Result, finish
from benchmarks.device.sections import NAMES

MARKDOWN_FILE, JSON_FILE, TUNING_FILE = "report.md", "results.json", "tuning.json"
_TIMED_COLUMNS = ("case", "µs", "spread", "GB/s", "TFLOP/s", "of floor", "theirs/ours", "more")
_MORE = ("tokens_per_s", "error", "start_s", "prepare_s")


def write_report(out: Path) -> None:
    events = read_events(out / EVENTS_FILE)
    document = summary(events)
    _replace(out / JSON_FILE, json.dumps(document, indent=1) + "\n")
    _replace(out / MARKDOWN_FILE, "\n".join(markdown(document)) + "\n")
    table = tuning_table(document["cases"])
    if table:
        _replace(out / TUNING_FILE, json.dumps(table, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: whoever is ended meanwhile leaves the old one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def summary(events: list[Event]) -> dict[str, Any]:
    """Runs, ceilings, and one entry per case that any run knew of."""
    latest = latest_results(events)
    found = list(latest.values())
    running = {case_of(event): event for event in events if event["event"] in ("start", "ready")}
    for case_id in planned(events):
        if case_id not in latest:
            reason = "a run ended while it ran" if case_id in running else "no run reached it"
            found.append({"section": case_id[0], "name": case_id[1], "status": "left out", "reason": reason})
    found.sort(key=lambda result: NAMES.index(result["section"]) if result["section"] in NAMES else len(NAMES))
    ceilings, cases = finish(found)
    runs = [{key: event[key] for key in event if key != "worker"} for event in events if event["event"] == "run"]
    return {"runs": runs, "ceilings": ceilings, "gpu_states": gpu_states(events), "cases": cases}


def gpu_states(events: Iterable[Event]) -> dict[str, dict[str, list[float]]]:
    """Section that was running -> clock or power -> least, most."""
    section, found = "", {}
    for event in events:
        section = event.get("section") or section
        if event["event"] == "gpu" and section:
            for name in ("clocks.sm", "power.draw"):
                value = _number(event.get(name))
                if value is not None:
                    low, high = found.setdefault(section, {}).get(name, (value, value))
                    found[section][name] = [min(low, value), max(high, value)]
    return found


def _number(text: Any) -> float | None:
    try:
        return float(str(text).split()[0])
    except (ValueError, IndexError):
        return None


def markdown(document: dict[str, Any]) -> Iterator[str]:
    cases: list[Result] = document["cases"]
    yield "# Device benchmark"
    yield ""
    for run in document["runs"]:
        yield from _run_lines(run)
    ceilings = ", ".join(f"{name} {value:g}" for name, value in document["ceilings"].items())
    yield f"* Ceilings: {ceilings or 'not measured'}"
    for section, states in document["gpu_states"].items():
        yield f"* {section}: " + ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in states.items())
    yield from ("", "## Predictions and measurements", "")
    yield from _table(("case", "number", "predicted", "aim", "measured", "why"), map(_cells_of(cases), PREDICTIONS))
    yield from _check_lines([result for result in cases if result["section"] in ("canary", "checks", "sanitize")])
    yield from ("", "## Times", "")
    yield from _table(_TIMED_COLUMNS, (_timed_cells(result) for result in cases if "us" in result))
    yield from _end_lines(cases)
    others = [result for result in cases if result["status"] == "ok" and not ({"us", "us_of_steps"} & result.keys())]
    others = [result for result in others if result["section"] != "checks"]
    yield from ("", "## Other findings", "")
    yield from (f"* {result['section']}: {result['name']}: {_details(result)}" for result in others)
    yield from _tuning_lines(cases)
    yield from ("", "## What did not run", "")
    yield from (f"* {text}: {names}" for text, names in _by_reason([one for one in cases if one["status"] != "ok"]).items())


def _run_lines(run: Event) -> Iterator[str]:
    machine = run["machine"]
    gpu = ", ".join(machine["gpu"].values())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version != "absent")
    ptxas = "; ".join(f"{path}: {version}" for path, version in machine["ptxas"].items()) or "none found"
    yield f"* Run {run['run']} at {machine['commit']}: {gpu}; {machine['cpus']} CPUs; Python {machine['python']}, {versions}"
    yield f"  ptxas {ptxas}; sections {', '.join(run['only'])}"


def _cells_of(cases: list[Result]) -> Any:
    by_name = {result["name"]: result for result in cases}

    def cells(prediction: Prediction) -> tuple[str, ...]:
        low = "at most" if prediction.low is None else f"{prediction.low:g} to"
        predicted = f"{low} {prediction.high:g}"
        aim = "" if prediction.aim is None else f"{prediction.aim:g}"
        what = f"{prediction.metric} as {prediction.over}" if prediction.over else prediction.metric
        measured = measured_value(prediction, by_name)
        text = "not measured" if measured is None else f"{measured:g}"
        return prediction.case, what, predicted, aim, text, prediction.why

    return cells


def measured_value(prediction: Prediction, by_name: dict[str, Result]) -> float | None:
    result = by_name.get(prediction.case, {})
    if not prediction.over:
        return result.get(prediction.metric)
    other = by_name.get(prediction.over, {})
    return round(other["us"] / result["us"], 3) if "us" in result and "us" in other else None


def _timed_cells(result: Result) -> tuple[str, ...]:
    spread = f"{(result['us_max'] - result['us_min']) / result['us']:.1%}" if "us_max" in result else ""
    of_floor = f"{result['share_of_floor']:.1%}" if "share_of_floor" in result else ""
    rates = (f"{result[name]:.0f}" if name in result else "" for name in ("gb_per_s", "tflop_per_s"))
    against = f"{result['theirs_over_ours']:.2f}" if "theirs_over_ours" in result else ""
    more = ", ".join(f"{name} {result[name]}" for name in _MORE if name in result)
    return result["name"], f"{result['us']:.1f}", spread, *rates, of_floor, against, more


def _check_lines(checks: list[Result]) -> Iterator[str]:
    if not checks:
        return
    checks = [result for result in checks if result["status"] in ("ok", "failed")]
    passed = [result for result in checks if result["status"] == "ok"]
    worst = max((_number(result.get("error")) or 0.0 for result in passed), default=0.0)
    yield from ("", f"Checks: {len(passed)} of {len(checks)} passed, largest error {worst:.2e}.")


def _end_lines(cases: list[Result]) -> Iterator[str]:
    """Of profiled kernels: what share of the kernel's cycles the multiprocessors had work."""
    profiled = [result for result in cases if "busy" in result]
    if not profiled:
        return
    yield from ("", "## Ends of multiprocessors", "")
    names = tuple(profiled[0]["busy"])
    rows = ((result["name"], *(f"{result['busy'][name]:.1%}" for name in names)) for result in profiled)
    yield from _table(("case", *(f"{name} busy" for name in names)), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = tuple(head)
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _details(result: Result) -> str:
    hidden = ("section", "name", "status")
    return ", ".join(f"{key} {value}" for key, value in result.items() if key not in hidden)[:600]


def _by_reason(results: list[Result]) -> dict[str, str]:
    """Status and reason -> the cases, so that one reason takes one line."""
    grouped: dict[str, list[str]] = {}
    for result in results:
        text = f"{result['section']}: {result['status']}: {result.get('reason', '')[:300]}"
        grouped.setdefault(text, []).append(result["name"])
    return {text: "; ".join(names)[:1000] for text, names in grouped.items()}


def _tuning_lines(cases: list[Result]) -> Iterator[str]:
    tried = [result for result in cases if result["section"] == "tune" and result["status"] == "ok"]
    for kind, shapes in tuning_table(tried).items():
        yield f"* tune: {len(tried)} configs on {kind}; better than the default: {shapes or 'none'}"


def tuning_table(cases: Iterable[Result]) -> dict[str, Any]:
    """What jaxserve reads as JAXSERVE_TUNING_FILE: the fastest configs of what was tuned so far."""
    tuned = [result for result in cases if result["section"] == "tune" and result["status"] == "ok"]
    if not tuned:
        return {}
    from jaxserve.bench.kernels import Measured, best_table

    measured = [
        Measured(one["op"], one["key"], one["changes"], tuple(one["us_of_steps"]), fields=one["config"]) for one in tuned
    ]
    return best_table(tuned[0]["device_kind"], measured)
