"""Accumulators of one process, and their snapshot: plain data, which another process can show.

A Registry has those families of the table that its process is the source of. Nothing is global: several registries live side by
side. Adding to one costs about a microsecond; nothing is computed before a snapshot is taken. Belongs to one thread.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import psutil

from jaxserve.metrics.families import FAMILIES, Family, Source

Labels = tuple[str, ...]
# In place of the labels of series beyond a family's most: a client that thinks up labels makes no more than one of these.
OTHER = "other"


class Series(msgspec.Struct, array_like=True):
    """One combination of labels."""

    labels: list[str]
    value: float  # of a histogram the sum of what was observed
    counts: list[int] = []  # of a histogram: in each bucket alone, the last one without a bound


class FamilySnapshot(msgspec.Struct, array_like=True):
    name: str
    labels: list[str]  # their names
    series: list[Series]
    buckets: list[float] = []  # upper bounds of a histogram's


class Snapshot(msgspec.Struct):
    taken_s: float  # Unix time
    families: list[FamilySnapshot]


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The sums of what processes with the same families have counted; as old as the first."""
    families: dict[str, FamilySnapshot] = {}
    sums: dict[str, dict[Labels, Series]] = {}
    for snapshot in snapshots:
        for family in snapshot.families:
            families.setdefault(family.name, family)
            known = sums.setdefault(family.name, {})
            for series in family.series:
                labels = tuple(series.labels)
                other = known.get(labels)
                if other is not None:
                    counts = [a + b for a, b in zip(other.counts, series.counts, strict=True)]
                    series = Series(series.labels, other.value + series.value, counts)
                known[labels] = series
    summed = [msgspec.structs.replace(family, series=list(sums[name].values())) for name, family in families.items()]
    return Snapshot(snapshots[0].taken_s, summed)


class _Accumulator:
    __slots__ = ("_values", "family")

    def __init__(self, family: Family, buckets: Sequence[float] = ()) -> None:
        self.family = family
        known = family.known if family.labels else ((),)
        self._values: dict[Labels, float] = {labels: 0.0 for labels in known if len(labels) == len(family.labels)}

    def _bounded(self, labels: Labels) -> Labels:
        """Of a combination that is new."""
        assert len(labels) == len(self.family.labels), f"{self.family.name} has {self.family.labels}, got {labels}"
        return labels if len(self._values) < self.family.max_series else (OTHER,) * len(labels)

    def value(self, labels: Labels = ()) -> float:
        return self._values.get(labels, 0.0)

    def snapshot(self) -> FamilySnapshot:
        series = [Series(list(labels), value) for labels, value in self._values.items()]
        return FamilySnapshot(self.family.name, list(self.family.labels), series)


class Counter(_Accumulator):
    __slots__ = ()

    def inc(self, amount: float = 1.0, labels: Labels = ()) -> None:
        values = self._values
        if labels not in values:
            labels = self._bounded(labels)
        values[labels] = values.get(labels, 0.0) + amount

    def set_total(self, total: float, labels: Labels = ()) -> None:
        """For what is counted elsewhere anyway."""
        self._values[labels if labels in self._values else self._bounded(labels)] = total


class Gauge(_Accumulator):
    __slots__ = ()

    def set(self, value: float, labels: Labels = ()) -> None:
        self._values[labels if labels in self._values else self._bounded(labels)] = value

    def inc(self, amount: float = 1.0, labels: Labels = ()) -> None:
        values = self._values
        if labels not in values:
            labels = self._bounded(labels)
        values[labels] = values.get(labels, 0.0) + amount


class Histogram(_Accumulator):
    __slots__ = ("_bounds", "_counts", "_edges")

    def __init__(self, family: Family, buckets: Sequence[float] = ()) -> None:
        super().__init__(family)
        self._bounds = list(buckets or family.buckets)
        assert self._bounds == sorted(set(self._bounds)), f"the buckets of {family.name} must increase: {self._bounds}"
        self._edges = np.array(self._bounds)
        self._counts: dict[Labels, list[int]] = {labels: self._zeros() for labels in self._values}

    def _zeros(self) -> list[int]:
        return [0] * (len(self._bounds) + 1)

    def _series(self, labels: Labels) -> tuple[Labels, list[int]]:
        counts = self._counts.get(labels)
        if counts is None:
            labels = self._bounded(labels)
            counts = self._counts.setdefault(labels, self._zeros())
            self._values.setdefault(labels, 0.0)
        return labels, counts

    def observe(self, value: float, labels: Labels = ()) -> None:
        labels, counts = self._series(labels)
        counts[bisect.bisect_left(self._bounds, value)] += 1
        self._values[labels] += value

    def observe_many(self, values: np.ndarray, times: np.ndarray, labels: Labels = ()) -> None:
        """As if each of the values came by itself, and so many times."""
        labels, counts = self._series(labels)
        added = np.bincount(np.searchsorted(self._edges, values, side="left"), times, minlength=len(counts))
        counts[:] = (np.array(counts) + added.astype(np.int64)).tolist()
        self._values[labels] += float(values @ times)

    def count(self, labels: Labels = ()) -> int:
        return sum(self._counts.get(labels, ()))

    def snapshot(self) -> FamilySnapshot:
        series = [Series(list(labels), value, list(self._counts[labels])) for labels, value in self._values.items()]
        return FamilySnapshot(self.family.name, list(self.family.labels), series, self._bounds)


A = TypeVar("A", Counter, Gauge, Histogram)
_KINDS: dict[str, type[Counter] | type[Gauge] | type[Histogram]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Registry:
    def __init__(
        self, source: Source, buckets: Mapping[str, Sequence[float]] | None = None, custom_labels: Labels = ()
    ) -> None:
        """`buckets`: other ones than the table's, by name. `custom_labels`: names of those that come with requests; their
        values stand behind a family's own."""
        changed = buckets or {}
        families = [
            dataclasses.replace(family, labels=family.labels + custom_labels) if family.per_request else family
            for family in FAMILIES.values()
            if family.source in (source, "every")
        ]
        self._all = {family.name: _KINDS[family.kind](family, changed.get(family.name, ())) for family in families}

    def counter(self, name: str) -> Counter:
        return self._of(name, Counter)

    def gauge(self, name: str) -> Gauge:
        return self._of(name, Gauge)

    def histogram(self, name: str) -> Histogram:
        return self._of(name, Histogram)

    def _of(self, name: str, kind: type[A]) -> A:
        found = self._all[name]
        assert isinstance(found, kind), f"{name} is a {found.family.kind}"
        return found

    def snapshot(self, now_s: float) -> Snapshot:
        return Snapshot(now_s, [accumulator.snapshot() for accumulator in self._all.values()])


def count_process(registry: Registry, component: str) -> None:
    """What this process takes, before a snapshot."""
    registry.counter("process_cpu_seconds_total").set_total(time.process_time(), (component,))
    registry.gauge("process_resident_memory_bytes").set(psutil.Process().memory_info().rss, (component,))
