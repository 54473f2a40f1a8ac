"""Metrics: one table of families, accumulators in every process, plain snapshots between them, and Prometheus' text."""

from jaxserve.metrics.families import FAMILIES, PREFIX, Family, Kind, Source
from jaxserve.metrics.registry import (
    OTHER,
    Counter,
    FamilySnapshot,
    Gauge,
    Histogram,
    Registry,
    Series,
    Snapshot,
    count_process,
    merged,
)

__all__ = [
    "FAMILIES", "OTHER", "PREFIX", "Counter", "Family", "FamilySnapshot", "Gauge", "Histogram", "Kind", "Registry", "Series",
    "Snapshot", "Source", "count_process", "merged",
]  # fmt: skip
