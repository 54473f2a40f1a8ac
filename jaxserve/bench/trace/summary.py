"""Where the time of the traced steps went: per stage of the host, per op of the devices, and in the devices' gaps."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable

from jaxserve.bench.trace.events import LAUNCH, Event, Trace, stages
from jaxserve.bench.trace.intervals import gaps, overlaps, union

UNNAMED = "(between spans)"


@dataclasses.dataclass(frozen=True)
class Stage:
    """What the host did under one name."""

    name: str
    count: int
    total_us: float
    longest_us: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """No device worked."""

    begin_us: float  # from the window's begin
    us: float
    step: int  # launched last before its end
    host: tuple[tuple[str, float], ...]  # what the host did meanwhile and for how long, the longest first
    inside: tuple[tuple[str, float], ...]  # the same of what stands within that


@dataclasses.dataclass(frozen=True)
class Summary:
    file: str
    num_steps: int
    steps_of: dict[str, int]  # by kind
    rows: float  # mean of a step
    tokens: float
    window_us: float  # from the first launch to the end of what the host did last
    step_us: tuple[float, float, float]  # from launch to launch: mean, median, longest; 0 where there is but one
    host: tuple[Stage, ...]  # its stages, longest first
    busy: float  # share of the window in which some device worked
    num_devices: int
    gaps: tuple[Gap, ...]  # longest first
    ops: tuple[Stage, ...]  # of the devices, longest first


def summarize(trace: Trace, num_gaps: int = 5, num_ops: int = 10) -> Summary:
    launches = trace.launches
    every = list(stages(trace))
    begin = max(event.begin_us for event in every if event.begin_us <= launches[0].begin_us)  # of the stage it stands in
    named = [event for event in every if event.begin_us >= begin]
    end = max(event.end_us for event in named)
    busy = union(trace.device, begin, end)
    periods = [after.begin_us - before.begin_us for before, after in itertools.pairwise(launches)]
    longest = sorted(gaps(busy, begin, end), key=lambda gap: gap[0] - gap[1])[:num_gaps]
    return Summary(
        file=str(trace.path),
        num_steps=len(launches),
        steps_of=dict(collections.Counter(launch.name.removeprefix(LAUNCH) for launch in launches)),
        rows=statistics.fmean(float(launch.args.get("rows", 0)) for launch in launches),
        tokens=statistics.fmean(float(launch.args.get("tokens", 0)) for launch in launches),
        window_us=end - begin,
        step_us=(statistics.fmean(periods), statistics.median(periods), max(periods)) if periods else (0.0, 0.0, 0.0),
        host=_by_name(named, unnamed_us=end - begin - sum(event.us for event in named)),
        busy=sum(stop - start for start, stop in busy) / (end - begin) if end > begin else 0.0,
        num_devices=trace.num_devices,
        gaps=tuple(_gap(trace, named, begin, start, stop) for start, stop in longest),
        ops=_by_name(event for event in trace.device if "::" not in event.name)[:num_ops],
    )


def _by_name(events: Iterable[Event], unnamed_us: float = 0.0) -> tuple[Stage, ...]:
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.us)
    found = [Stage(name, len(us), sum(us), max(us)) for name, us in times.items()]
    if unnamed_us > 0:
        found.append(Stage(UNNAMED, 0, unnamed_us, 0.0))
    return tuple(sorted(found, key=lambda stage: -stage.total_us))


def _gap(trace: Trace, named: list[Event], begin: float, start: float, stop: float) -> Gap:
    step = max((launch for launch in trace.launches if launch.begin_us < stop), key=lambda launch: launch.begin_us)
    host = overlaps(named, start, stop)
    unnamed_us = stop - start - sum(us for _, us in host)
    if unnamed_us > 0.01 * (stop - start):
        host = sorted([*host, (UNNAMED, unnamed_us)], key=lambda item: -item[1])
    outer = {id(event) for event in named}
    inside = overlaps([event for event in trace.host if id(event) not in outer], start, stop)
    return Gap(start - begin, stop - start, int(step.args["step_num"]), tuple(host[:4]), tuple(inside[:4]))
