"""From results of cases to rates, shares of the ceilings and ratios; the table on the terminal and the JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Result = dict[str, Any]
_HOUSEKEEPING = ("event", "time_s")


def finish(results: list[Result]) -> tuple[dict[str, float], list[Result]]:
    """The measured ceilings, and the results with rates, shares and ratios entered."""
    results = [{key: value for key, value in result.items() if key not in _HOUSEKEEPING} for result in results]
    for result in results:
        _add_rates(result)
    ceilings = _ceilings(results)
    ours = {result["name"]: result for result in results if "us" in result and "against" not in result}
    for result in results:
        if "us" not in result or result["section"] == "ceilings":
            continue
        _add_shares(result, ceilings)
        other = ours.get(result.get("against", ""))
        if other is not None:
            # Above 1: ours takes less time.
            result["theirs_over_ours"] = round(result["us"] / other["us"], 3)
    return ceilings, results


def _add_rates(result: Result) -> None:
    if "us" not in result:
        return
    if result.get("bytes"):
        result["gb_per_s"] = round(result["bytes"] / result["us"] / 1e3, 1)
    if result.get("flop"):
        result["tflop_per_s"] = round(result["flop"] / result["us"] / 1e6, 2)


def _ceilings(results: list[Result]) -> dict[str, float]:
    own = [result for result in results if result["section"] == "ceilings" and result["status"] == "ok"]
    ceilings = {}
    for kind, unit in (("copy", "gb_per_s"), ("read", "gb_per_s"), ("matmul", "tflop_per_s")):
        rates = [result[unit] for result in own if result["name"].startswith(kind)]
        if rates:
            ceilings[f"{kind}_{unit}"] = max(rates)
    return ceilings


def _add_shares(result: Result, ceilings: dict[str, float]) -> None:
    """Of the better bandwidth, of the matrix product, and of the floor: the larger of the two times these allow."""
    bandwidth = max(ceilings.get("copy_gb_per_s", 0), ceilings.get("read_gb_per_s", 0))
    matmul = ceilings.get("matmul_tflop_per_s", 0)
    floor_us = 0.0
    if bandwidth and "gb_per_s" in result:
        result["share_of_bandwidth"] = round(result["gb_per_s"] / bandwidth, 3)
        floor_us = result["bytes"] / bandwidth / 1e3
    if matmul and "tflop_per_s" in result:
        result["share_of_matmul"] = round(result["tflop_per_s"] / matmul, 3)
        floor_us = max(floor_us, result["flop"] / matmul / 1e6)
    if floor_us:
        result["floor_us"] = round(floor_us, 2)
        result["share_of_floor"] = round(floor_us / result["us"], 3)


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_without_nan(document), indent=1) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(ceilings: dict[str, float], results: list[Result]) -> None:
    print("\n" + ", ".join(f"{name} {value:g}" for name, value in ceilings.items()))
    _print_checks([result for result in results if result["section"] == "checks"])
    print(f"\n{'case':46} {'µs':>10} {'spread':>7} {'GB/s':>7} {'TFLOP/s':>8} {'of floor':>8} {'theirs/ours':>11}")
    for result in results:
        if "us" in result:
            print(_line(result))
    others = [result for result in results if result["section"] != "checks" and result["status"] != "ok"]
    for text, names in _by_reason(others).items():
        print(f"{text}: {names}")


def _line(result: Result) -> str:
    spread = (result["us_max"] - result["us_min"]) / result["us"] if "us_max" in result else math.nan
    against = result.get("theirs_over_ours")
    cells = (
        f"{result['name'][:46]:46} {result['us']:10.1f} {spread:7.1%}",
        f"{result.get('gb_per_s', 0) or 0:7.0f} {result.get('tflop_per_s', 0) or 0:8.1f}",
        f"{result['share_of_floor']:8.1%}" if "share_of_floor" in result else " " * 8,
        f"{against:11.2f}" if against is not None else " " * 11,
        f"{result['tokens_per_s']:.0f} tok/s" if "tokens_per_s" in result else "",
    )
    return " ".join(cells).rstrip()


def _print_checks(checks: list[Result]) -> None:
    if not checks:
        return
    passed = [result for result in checks if result["status"] == "ok"]
    worst = max((result["error"] for result in passed), default=0.0)
    print(f"checks: {len(passed)} of {len(checks)} passed, largest error {worst:.2e}")
    for text, names in _by_reason([result for result in checks if result["status"] != "ok"]).items():
        print(f"  {text}: {names}")


def _by_reason(results: list[Result]) -> dict[str, str]:
    """Status and reason -> the cases, so that one reason takes one line."""
    grouped: dict[str, list[str]] = {}
    for result in results:
        grouped.setdefault(f"{result['status']}: {result.get('reason', '')[:160]}", []).append(result["name"])
    return {text: "; ".join(names)[:400] for text, names in grouped.items()}
