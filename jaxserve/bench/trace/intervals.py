"""Times within a trace: in which of them something ran, in which nothing did, and for how long each of several things did."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.bench.trace.events import Event


def union(events: Sequence[Event], begin: float, end: float) -> list[tuple[float, float]]:
    """Intervals in which one of them, which are by begin, runs, clipped."""
    found: list[tuple[float, float]] = []
    for event in events:
        start, stop = max(event.begin_us, begin), min(event.end_us, end)
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def gaps(busy: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """What is between the intervals of a union."""
    edges = [begin, *(edge for interval in busy for edge in interval), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]


def overlaps(events: Sequence[Event], start: float, stop: float) -> list[tuple[str, float]]:
    """By name, how long; nested ones of one name count once, as the longest says."""
    found: dict[str, float] = {}
    ends: dict[str, float] = {}
    for event in events:
        begin = max(event.begin_us, start, ends.get(event.name, start))
        us = min(event.end_us, stop) - begin
        if us > 0:
            found[event.name] = found.get(event.name, 0.0) + us
            ends[event.name] = event.end_us
    return sorted(found.items(), key=lambda item: -item[1])
