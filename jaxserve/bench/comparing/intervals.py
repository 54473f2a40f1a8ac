"""How sure a ratio of two measurements is: 95 % intervals, the same at every call.

Over repeated runs, Welch's t interval of the difference of the logarithms: a handful of runs is too few for a bootstrap. Over
the requests of a run, a percentile bootstrap that draws whole requests, since the gaps of one request resemble each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
_RESAMPLES, _FEWEST_RESAMPLES = 2000, 200
_MOST_DRAWN = 100_000_000  # values, over all resamples
_DRAWN_AT_ONCE = 1_000_000
_SEED = 0

# A measurement: what belongs together (the gaps of one request, or just its one number) stands in one array.
Clusters = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Interval:
    ratio: float
    low: float
    high: float


def of_runs(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Of the geometric means; positive numbers, at least two on each side."""
    one, other = np.log(before), np.log(after)
    difference = float(other.mean() - one.mean())
    parts = [float(side.var(ddof=1)) / len(side) for side in (one, other)]
    spread = sum(parts)
    if spread == 0:
        return Interval(*[math.exp(difference)] * 3)
    freedom = spread**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (one, other), strict=True))
    reach = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * math.sqrt(spread)
    return Interval(math.exp(difference), math.exp(difference - reach), math.exp(difference + reach))


def of_samples(before: Clusters, after: Clusters, statistics: Sequence[str]) -> dict[str, Interval]:
    """Of each statistic, by its name; ratios that are not defined are left out."""
    rng = np.random.default_rng(_SEED)
    size = sum(map(len, before)) + sum(map(len, after))
    count = min(max(_MOST_DRAWN // size, _FEWEST_RESAMPLES), _RESAMPLES)
    drawn = [_resampled(side, statistics, count, rng) for side in (before, after)]
    points = [values_of(np.concatenate(list(side)), statistics) for side in (before, after)]
    tail = 100 * (1 - CONFIDENCE) / 2
    found = {}
    for i, name in enumerate(statistics):
        if points[0][i] > 0 and points[1][i] > 0 and (drawn[0][:, i] > 0).all():
            low, high = np.percentile(drawn[1][:, i] / drawn[0][:, i], (tail, 100 - tail))
            found[name] = Interval(float(points[1][i] / points[0][i]), float(low), float(high))
    return found


def values_of(values: np.ndarray, statistics: Sequence[str]) -> np.ndarray:
    """[..., statistic], over the last axis: mean, median, or a percentile as p99."""
    return np.stack([_value(values, name) for name in statistics], axis=-1)


def _value(values: np.ndarray, statistic: str) -> np.ndarray:
    if statistic == "mean":
        return np.asarray(values.mean(axis=-1))
    return np.asarray(np.percentile(values, 50 if statistic == "median" else float(statistic[1:]), axis=-1))


def _resampled(clusters: Clusters, statistics: Sequence[str], count: int, rng: np.random.Generator) -> np.ndarray:
    """[resample, statistic]"""
    size = len(clusters)
    if all(len(cluster) == 1 for cluster in clusters):
        values, at_once = np.concatenate(list(clusters)), max(_DRAWN_AT_ONCE // size, 1)
        parts = [min(at_once, count - start) for start in range(0, count, at_once)]
        return np.concatenate([values_of(values[rng.integers(size, size=(part, size))], statistics) for part in parts])
    chosen = (rng.integers(size, size=size) for _ in range(count))
    return np.array([values_of(np.concatenate([clusters[i] for i in places]), statistics) for places in chosen])
