"""From results to rates, shares of the measured ceilings and ratios. Pure functions of dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]
_HOUSEKEEPING = ("event", "time_s", "run", "worker")


def finish(results: Iterable[Result]) -> tuple[dict[str, float], list[Result]]:
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
        found = [result[unit] for result in own if result["name"].startswith(kind)]
        if found:
            ceilings[f"{kind}_{unit}"] = max(found)
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
