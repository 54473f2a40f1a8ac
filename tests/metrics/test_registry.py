"""Accumulators, their snapshots on the wire, and Prometheus' text."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxserve.messages import pack, unpack
from jaxserve.metrics import FAMILIES, Family, Histogram, Registry, Snapshot
from jaxserve.metrics.exposition import Labelled, render
from jaxserve.metrics.registry import Counter


def test_one_by_one_and_together_are_the_same() -> None:
    family = dataclasses.replace(FAMILIES["inter_token_latency_seconds"], buckets=(0.5, 1.0, 2.0))
    values = np.array([0.0, 0.5, 0.50001, 1.0, 1.5, 2.0, 99.0, -1.0])
    one_by_one, together = Histogram(family), Histogram(family)
    for value in values.tolist():
        one_by_one.observe(value)
    ones = np.ones(len(values), np.int64)
    together.observe_many(values[:3], ones[:3])
    together.observe_many(values[3:], ones[3:])
    together.observe_many(values[:0], ones[:0])
    assert one_by_one.snapshot() == together.snapshot()
    assert together.snapshot().series[0].counts == [3, 2, 2, 1]
    assert together.count() == len(values)
    together.observe_many(np.array([5.0, 0.1]), np.array([3, 2]))
    assert together.snapshot().series[0].counts == [5, 2, 2, 4] and together.value() == values.sum() + 15.2


def test_series_are_bounded() -> None:
    family = Family("x_total", "counter", "main", "", ("a", "b"), max_series=10)
    counter = Counter(family)
    for i in range(1000):
        counter.inc(1, (str(i), "b"))
    series = counter.snapshot().series
    assert len(series) == 11 and series[-1].labels == ["other", "other"] and series[-1].value == 990
    counter.inc(5, ("3", "b"))
    assert counter.value(("3", "b")) == 6


def test_the_table_is_sound() -> None:
    for family in FAMILIES.values():
        assert family.help.endswith((".", ")")), family.name
        assert all(len(known) == len(family.labels) for known in family.known), family.name
        assert list(family.buckets) == sorted(set(family.buckets))
    with pytest.raises(AssertionError, match="counters end with _total"):
        Family("x", "counter", "main", "")


def filled(source: str, custom: tuple[str, ...] = ()) -> Snapshot:
    """Every family with something in it; across the wire, as from a worker."""
    registry = Registry(source, custom_labels=custom)  # type: ignore[arg-type]
    for i, family in enumerate(FAMILIES.values()):
        if family.source not in (source, "every"):
            continue
        labels = tuple('q"\\\n' for _ in family.labels) + custom * family.per_request
        if family.kind == "counter":
            registry.counter(family.name).inc(i + 0.5, labels)
        elif family.kind == "gauge":
            registry.gauge(family.name).set(-i, labels)
        else:
            registry.histogram(family.name).observe(family.buckets[1], labels)
    return unpack(pack(registry.snapshot(1e9)), Snapshot)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_prometheus_reads_what_is_written(accept: str) -> None:
    parts = [
        Labelled(filled("main", ("team",)), {"model_name": "m"}),
        Labelled(filled("scheduler"), {"model_name": "m", "dp_rank": "0"}),
        Labelled(filled("scheduler"), {"model_name": "m", "dp_rank": "1"}),
        Labelled(filled("detokenizer"), {"model_name": "m", "dp_rank": "x"}),
    ]
    text, content_type = render(parts, accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    parse = parse_openmetrics if accept else parse_text
    families = {family.name: family for family in parse(text.decode())}
    assert set(families) == {"jaxserve:" + name.removesuffix("_total") for name in FAMILIES}
    steps = [s for s in families["jaxserve:num_steps"].samples if s.labels["kind"] == 'q"\\\n']
    assert families["jaxserve:num_steps"].type == "counter"
    assert [s.labels["dp_rank"] for s in steps] == ["0", "1"] and len({s.value for s in steps}) == 1
    buckets = [s.value for s in families["jaxserve:e2e_request_latency_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[0] == 0 and buckets[-1] == 1
    assert msgspec.json.encode(parts[0].snapshot)  # plain data
