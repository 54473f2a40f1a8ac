"""Ratios of the numbers of two sets of runs, and what can be said of them."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.bench.comparing.intervals import Interval, of_runs, of_samples
from jaxserve.bench.comparing.measures import Measure, Samples
from jaxserve.bench.comparing.pairing import Pair
from jaxserve.bench.record import Metric, Record, number


class Verdict(enum.Enum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference seen"
    UNKNOWN = "one run each, no samples"  # a ratio, and nothing to say how sure it is


@dataclasses.dataclass(frozen=True)
class Comparison:
    metric: Metric
    before: float
    after: float
    interval: Interval | None
    basis: str  # what the interval was drawn from: runs, requests, rounds; "" without one

    @property
    def ratio(self) -> float:
        return self.interval.ratio if self.interval else self.after / self.before

    @property
    def verdict(self) -> Verdict:
        if self.interval is None:
            return Verdict.UNKNOWN
        if self.interval.low <= 1 <= self.interval.high:
            return Verdict.SAME
        return Verdict.FASTER if (self.ratio > 1) == self.metric.more_is_better else Verdict.SLOWER

    @property
    def slower_by(self) -> float:
        """The share that is lost: of the speed, or that is added to the time; negative where it is faster."""
        return 1 - self.ratio if self.metric.more_is_better else self.ratio - 1


def compare(pair: Pair) -> Iterator[Comparison]:
    """Number by number, as far as both sides have it."""
    for samples, group in itertools.groupby(pair.kind.measures, key=lambda measure: measure.samples):
        yield from _compared(pair, samples, list(group))


def _compared(pair: Pair, samples: Samples | None, measures: Sequence[Measure]) -> Iterator[Comparison]:
    """Measures of the same samples, which are drawn once for all of them."""
    repeated = min(len(pair.before), len(pair.after)) > 1
    drawn: dict[str, Interval] = {}
    if samples is not None and not repeated:
        ours, theirs = _clusters(pair.before, samples), _clusters(pair.after, samples)
        if min(len(ours), len(theirs)) > 1:
            drawn = of_samples(ours, theirs, [measure.statistic for measure in measures])
    for measure in measures:
        metric = measure.metric
        sides = [_numbers(side, metric.key) for side in (pair.before, pair.after)]
        if not all(sides):
            continue
        interval = of_runs(*sides) if repeated and min(map(len, sides)) > 1 else drawn.get(measure.statistic)
        basis = "" if interval is None else "runs" if repeated else pair.kind.sample
        before, after = (math.exp(float(np.log(side).mean())) for side in sides)
        yield Comparison(metric, before, after, interval, basis)


def _clusters(records: Sequence[Record], samples: Samples) -> list[np.ndarray]:
    """None at all if one of the records has none."""
    each = [samples(record) for record in records]
    return [cluster for one in each for cluster in one] if all(each) else []


def _numbers(records: Sequence[Record], key: str) -> list[float]:
    """Those that have a ratio."""
    values = (number(record, key) for record in records)
    return [value for value in values if value is not None and 0 < value < math.inf]
