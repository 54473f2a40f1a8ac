"""A run's record as people read it: SGLang's table, with what failed; and the table of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.bench.record import LATENCIES, Record

_WIDTH = 50
_SECTIONS = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}
assert set(_SECTIONS) == set(LATENCIES)
_STATISTICS = ("mean", "median", "p90", "p95", "p99")
_MAX_ERROR_CHARS = 160
# Columns of a sweep's table behind the swept options: heading, key, format.
_COLUMNS = (
    ("req/s", "request_throughput", ".2f"), ("out tok/s", "output_throughput", ".1f"), ("concurrency", "concurrency", ".2f"),
    ("TTFT mean", "mean_ttft_ms", ".1f"), ("TTFT p99", "p99_ttft_ms", ".1f"), ("TPOT mean", "mean_tpot_ms", ".2f"),
    ("ITL p99", "p99_itl_ms", ".2f"), ("E2E mean", "mean_e2e_latency_ms", ".1f"), ("E2E p99", "p99_e2e_latency_ms", ".1f"),
    ("SLO", "slo_attainment", ".1%"), ("failed", "failed", "d"),
)  # fmt: skip


def lines(record: Record) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Backend:", record["backend"])
    yield _line("Traffic request rate:", record["request_rate"])
    yield _line("Max request concurrency:", record["max_concurrency"] or "not set")
    yield _line("Successful requests:", record["completed"])
    if record["failed"]:
        yield _line("Failed requests:", record["failed"])
    if record["not_finished"]:
        yield _line("Not finished when interrupted:", record["not_finished"])
    yield from _throughput(record)
    for name, (title, short) in _SECTIONS.items():
        if record[f"mean_{name}_ms"] is not None:
            yield f"{title:-^{_WIDTH}}"
            yield from (_line(f"{_word(one)} {short} (ms):", record[f"{one}_{name}_ms"]) for one in _STATISTICS)
    if record["max_itl_ms"] is not None:
        yield _line("Max ITL (ms):", record["max_itl_ms"])
    yield from _cache(record.get("cache_report"))
    if "goodput" in record:
        yield f"{'Goodput':-^{_WIDTH}}"
        yield _line("Limits (ms):", ", ".join(f"{name} {limit:g}" for name, limit in record["slo_ms"].items()))
        yield _line("Goodput (req/s):", record["goodput"])
        yield _line("SLO attainment:", f"{record['slo_attainment']:.1%}")
    yield from _failures(record["failures"])
    yield "=" * _WIDTH


def _throughput(record: Record) -> Iterator[str]:
    yield _line("Benchmark duration (s):", float(record["duration"]))
    yield _line("Total input tokens:", record["total_input_tokens"])
    yield _line("Total generated tokens:", record["total_output_tokens"])
    if record["total_output_tokens_retokenized"] is not None:
        yield _line("Total generated tokens (retokenized):", record["total_output_tokens_retokenized"])
    yield _line("Request throughput (req/s):", record["request_throughput"])
    yield _line("Input token throughput (tok/s):", record["input_throughput"])
    yield _line("Output token throughput (tok/s):", record["output_throughput"])
    if record["max_output_tokens_per_s"]:
        yield _line("Peak output token throughput (tok/s):", record["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", record["max_concurrent_requests"])
    yield _line("Total token throughput (tok/s):", record["total_throughput"])
    if record["concurrency"] is not None:
        yield _line("Concurrency:", record["concurrency"])
    if record["accept_length"]:
        yield _line("Accept length:", record["accept_length"])


def _cache(report: Record | None) -> Iterator[str]:
    if report:
        yield f"{'Cache Hit Details':-^{_WIDTH}}"
        yield _line("Total prompt tokens:", report["total_prompt_tokens"])
        yield _line("Total cached tokens:", report["total_cached_tokens"])
        yield _line("Cache hit rate:", f"{report['cache_hit_rate_pct']:.1f}%")


def _failures(kinds: dict[str, dict[str, Any]]) -> Iterator[str]:
    if kinds:
        yield f"{'Failures':-^{_WIDTH}}"
        for kind, seen in sorted(kinds.items(), key=lambda item: -item[1]["count"]):
            message = " ".join(seen["message"].split())
            yield _line(f"{kind}:", seen["count"])
            yield f"  {message[:_MAX_ERROR_CHARS]}{'...' if len(message) > _MAX_ERROR_CHARS else ''}"


def _line(label: str, value: object) -> str:
    return f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value}"


def _word(statistic: str) -> str:
    return statistic.capitalize()


def sweep_table(names: Sequence[str], points: Sequence[tuple[Sequence[str], Record]]) -> Iterator[str]:
    """One line per run, as a Markdown table. Times in ms."""
    columns = [column for column in _COLUMNS if any(record.get(column[1]) is not None for _, record in points)]
    rows = [[*names, *(heading for heading, _, _ in columns)]]
    for values, record in points:
        rows.append([*values, *(_cell(record.get(key), form) for _, key, form in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
