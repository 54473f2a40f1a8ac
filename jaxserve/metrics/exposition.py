"""Prometheus' text, or OpenMetrics', made of snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.metrics.families import FAMILIES, PREFIX, Family
from jaxserve.metrics.registry import FamilySnapshot, Snapshot

_OPEN_METRICS = "application/openmetrics-text"


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A process' snapshot, and the labels that all of it has."""

    snapshot: Snapshot
    labels: Mapping[str, str]


class _Snapshots(Collector):
    def __init__(self, parts: Sequence[Labelled]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for name, family in FAMILIES.items():
            found = [
                (part.labels, one) for part in self._parts for one in part.snapshot.families if one.name == name and one.series
            ]
            if found:
                yield _metric(family, found)


def _metric(family: Family, found: Sequence[tuple[Mapping[str, str], FamilySnapshot]]) -> Metric:
    """One family, of all processes that have it. Each may have labels of its own."""
    metric = Metric(PREFIX + family.name.removesuffix("_total"), family.help, family.kind)
    suffix = "_total" if family.kind == "counter" else ""
    for common, part in found:
        bounds = [*(floatToGoString(bound) for bound in part.buckets), "+Inf"]
        for series in part.series:
            labels = {**common, **dict(zip(part.labels, series.labels, strict=True))}
            if family.kind != "histogram":
                metric.add_sample(metric.name + suffix, labels, series.value)
                continue
            total = 0
            for bound, count in zip(bounds, series.counts, strict=True):
                total += count
                metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, total)
            metric.add_sample(f"{metric.name}_sum", labels, series.value)
            metric.add_sample(f"{metric.name}_count", labels, total)
    return metric


def render(parts: Sequence[Labelled], accept: str) -> tuple[bytes, str]:
    """The text and its content type. `accept`: the header of whoever asks."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(parts))
    if _OPEN_METRICS not in accept:
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    # Not escaped: all names are legal anyway, and this library takes the colon out of samples' names, but not of families'.
    text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return text, f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8"
