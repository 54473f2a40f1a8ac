"""The pictures: latencies as shares of requests, throughput against latency, and the server's state over time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jaxserve.bench.comparing.measures import LATENCY_SAMPLES
from jaxserve.bench.plots import style
from jaxserve.bench.plots.runs import Run, by_source
from jaxserve.bench.record import LATENCIES, number

_PANELS = ("ttft", "tpot", "e2e_latency")
_MOST_FINE_TICKS = 300.0  # beyond it 1, 2, 5 and 10 would overlap
# Lines that a panel can show so that they are told apart.
_MOST_LINES = 10
_LOG_FROM = 8.0  # values that differ by more than this need a logarithmic axis


@dataclasses.dataclass(frozen=True)
class Picture:
    name: str  # of its file, without the ending
    figure: Figure


def pictures(runs: Sequence[Run]) -> Iterator[Picture]:
    """All that the records have numbers for."""
    with matplotlib.rc_context(style.settings()):
        detailed = [run for run in runs if any(LATENCY_SAMPLES["ttft"](run.record))]
        if detailed:
            yield Picture("latency_cdf", _latency_cdf(detailed[:_MOST_LINES]))
        if len(runs) > 1:
            yield Picture("throughput_latency", _throughput_latency(runs))
        timed = [run for run in runs if (run.record.get("timeline") or {}).get("time_s")]
        for place, run in enumerate(timed):
            yield Picture("timeline" if len(timed) == 1 else f"timeline_{place + 1}", _timeline(run))


def _latency_cdf(runs: Sequence[Run]) -> Figure:
    figure, axes = style.panels(len(_PANELS), title="Latency of requests")
    for place, run in enumerate(runs):
        dashes = style.DASHES[place % len(style.DASHES)]
        line_colour = style.colour(place, len(runs), ordered=len({one.source for one in runs}) == 1)
        for axis, name in zip(axes, _PANELS, strict=True):
            values = np.sort(np.concatenate([[], *LATENCY_SAMPLES[name](run.record)])) * 1e3
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values) * 100
                axis.step(values, shares, where="post", label=run.name, color=line_colour, linestyle=dashes)
    for axis, name in zip(axes, _PANELS, strict=True):
        axis.set(title=LATENCIES[name], xlabel="milliseconds", ylim=(0, 101))
        _scale(axis, "x")
    axes[0].set_ylabel("requests answered so fast, %")
    _legend(figure, axes[0])
    return figure


def _throughput_latency(runs: Sequence[Run]) -> Figure:
    named = ", ".join(dict.fromkeys(meaning for run in runs for meaning in run.meanings))
    title = "Throughput and latency" + (f" (numbers: {named})" if named else "")
    figure, axes = style.panels(len(_PANELS), title=title)
    sources = by_source(runs)
    for place, (source, group) in enumerate(sources.items()):
        line_colour, marker = style.colour(place, len(sources), ordered=False), style.MARKERS[place % len(style.MARKERS)]
        for axis, name in zip(axes, _PANELS, strict=True):
            for statistic, dashes, fill in (("median", "solid", line_colour), ("p99", style.DASHES[1], "white")):
                points = _points(group, f"{statistic}_{name}_ms")
                if points:
                    x, y, _ = zip(*points, strict=True)
                    label = ", ".join(part for part in (source, statistic) if part)
                    axis.plot(x, y, label=label, color=line_colour, linestyle=dashes, marker=marker, markerfacecolor=fill)
    for axis, name in zip(axes, _PANELS, strict=True):
        axis.set(title=LATENCIES[name], xlabel="output tokens per second")
        _scale(axis, "y")
        _name_points(axis, next(iter(sources.values())), f"p99_{name}_ms")
    axes[0].set_ylabel("milliseconds")
    _legend(figure, axes[0])
    return figure


def _points(runs: Sequence[Run], key: str) -> list[tuple[float, float, str]]:
    found = ((number(run.record, "output_throughput"), number(run.record, key), run.mark) for run in runs)
    return [(x, y, mark) for x, y, mark in found if x is not None and y is not None]


def _name_points(axis: Axes, runs: Sequence[Run], key: str) -> None:
    """Above the first file's upper line."""
    for x, y, mark in _points(runs, key):
        axis.annotate(
            mark, (x, y), (-3, 6), textcoords="offset points", ha="right", va="bottom", fontsize=9, path_effects=style.HALO
        )
    axis.margins(x=0.12, y=0.12)


def _timeline(run: Run) -> Figure:
    line = run.record["timeline"]
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    title = "The server over time" + (f": {run.name}" if run.name else "")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    requests, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    times = np.array(line["time_s"], float)
    shown = (("num_running_reqs", "running", "solid", 0), ("num_waiting_reqs", "waiting", style.DASHES[1], 1))
    for key, label, dashes, place in shown:
        values = _numbers(line.get(key), len(times))
        requests.step(times, values, where="post", label=label, color=style.COLOURS[place], linestyle=dashes)
    requests.set(ylabel="requests", ylim=(0, None))
    requests.yaxis.set_major_locator(MaxNLocator(integer=True))
    requests.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)
    usage = 100 * _numbers(line.get("token_usage"), len(times))
    memory.step(times, usage, where="post", color=style.COLOURS[2])
    memory.fill_between(times, usage, step="post", color=style.COLOURS[2], alpha=0.2, linewidth=0)
    memory.set(ylabel="KV used, %", xlabel="seconds since the first request", ylim=(0, None))
    return figure


def _numbers(values: Sequence[float | None] | None, count: int) -> np.ndarray:
    """NaN, a gap in the line, where the server did not say."""
    return np.array([np.nan if value is None else value for value in values or [None] * count], float)


def _scale(axis: Axes, which: str) -> None:
    """Logarithmic where values differ much; plain numbers at the ticks."""
    lines = [line.get_xdata() if which == "x" else line.get_ydata() for line in axis.get_lines()]
    values = np.concatenate([[], *map(np.asarray, lines)])
    values = values[values > 0]
    if not len(values) or values.max() / values.min() <= _LOG_FROM:
        axis.set(**{f"{which}lim": (0, None)})
        return
    axis.set(**{f"{which}scale": "log"})
    ticks = axis.xaxis if which == "x" else axis.yaxis
    ticks.set_major_locator(LogLocator(subs=(1,) if values.max() / values.min() > _MOST_FINE_TICKS else (1, 2, 5)))
    ticks.set_minor_formatter(NullFormatter())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: Figure, axis: Axes) -> None:
    """Beneath all panels; none for a single line without a name."""
    handles, labels = axis.get_legend_handles_labels()
    if any(labels):
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
