"""What a record of each kind can be compared by, and what of the record each number is a statistic of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve.bench.record import LATENCIES, LOAD_FIELDS, SERVING_METRICS, STATISTICS, Metric, Record

# A record's samples, of what belongs together in one array; none if it has no details.
Samples = Callable[[Record], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Measure:
    metric: Metric
    statistic: str = ""  # of the samples: mean, median, max, p99
    samples: Samples | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of records, as `record.kind_of` says."""

    load: tuple[str, ...]  # keys that two records must agree in to be about the same
    measures: tuple[Measure, ...]
    sample: str = ""  # what one sample is called


def _served(record: Record, key: str) -> list[tuple[int, float]]:
    """Of each request that was answered: its place, and its number."""
    errors = record.get("errors") or []
    return [(i, value) for i, value in enumerate(record.get(key) or []) if i < len(errors) and not errors[i]]


def _per_request(key: str) -> Samples:
    return lambda record: [np.array([float(value)]) for _, value in _served(record, key)]


def _tpot(record: Record) -> list[np.ndarray]:
    lens, ttfts = record.get("output_lens") or [], record.get("ttfts") or []
    ended = [(e2e, ttfts[i], lens[i]) for i, e2e in _served(record, "e2e_latencies") if i < min(len(lens), len(ttfts))]
    return [np.array([(e2e - ttft) / (length - 1)]) for e2e, ttft, length in ended if length > 1]


def _gaps(record: Record) -> list[np.ndarray]:
    errors, gaps = record.get("errors") or [], record.get("itls") or []
    return [np.array(one, float) for one, error in zip(gaps, errors, strict=False) if one and not error]


LATENCY_SAMPLES: dict[str, Samples] = {
    "e2e_latency": _per_request("e2e_latencies"),
    "ttft": _per_request("ttfts"),
    "tpot": _tpot,
    "itl": _gaps,
}


def _serving(metric: Metric) -> Measure:
    for name in LATENCIES:
        for statistic in STATISTICS:
            if metric.key == f"{statistic}_{name}_ms":
                return Measure(metric, statistic, LATENCY_SAMPLES[name])
    return Measure(metric)


def _rounds(key: str, first_step: int | None = None) -> Samples:
    """One array for each round."""

    def samples(record: Record) -> list[np.ndarray]:
        rounds = [np.atleast_1d(np.array(one, float)) for one in record.get(key) or []]
        return [one[first_step:] if len(one) > 1 else one for one in rounds]

    return samples


def _whole_rounds(record: Record) -> list[np.ndarray]:
    steps = zip(record.get("prefill_latencies") or [], record.get("decode_latencies") or [], strict=False)
    return [np.array([first + sum(others)]) for first, others in steps]


_THROUGHPUTS = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
KINDS: dict[str, Kind] = {
    "serving": Kind(LOAD_FIELDS, tuple(map(_serving, SERVING_METRICS)), "requests"),
    "offline": Kind(
        LOAD_FIELDS,
        (
            *(Measure(metric) for metric in SERVING_METRICS if metric.key in _THROUGHPUTS),
            Measure(Metric("total_latency", "Duration", "s", False)),
        ),
    ),
    "latency": Kind(
        ("model", "batch_size", "input_len", "output_len"),
        (
            Measure(Metric("prefill_latency", "Prefill", "s", False), "median", _rounds("prefill_latencies")),
            Measure(Metric("median_decode_latency", "Decode step", "s", False), "median", _rounds("decode_latencies", 1)),
            Measure(Metric("total_latency", "Whole batch", "s", False), "median", _whole_rounds),
        ),
        "rounds",
    ),
    "startup": Kind(
        ("model", "cache"),
        (
            Measure(Metric("ready_s", "Ready", "s", False)),
            Measure(Metric("first_answer_s", "First answer", "s", False)),
            Measure(Metric("fully_warm_s", "All programs", "s", False)),
        ),
    ),
    "scheduler": Kind(
        ("num_running", "page_size", "stream"),
        (
            Measure(Metric("total_us", "Step, median", "µs", False)),
            Measure(Metric("p99_total_us", "Step, p99", "µs", False)),
            Measure(Metric("admit_us", "Admitting one", "µs", False)),
        ),
    ),
}
