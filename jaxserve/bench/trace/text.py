"""The summary of a trace as lines to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.bench.trace.summary import Stage, Summary


def lines(summary: Summary) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.steps_of.items())
    yield summary.file
    yield (
        f"{summary.num_steps} steps ({kinds}) in {_ms(summary.window_us)} ms; {summary.rows:.1f} rows and "
        f"{summary.tokens:.1f} tokens each"
    )
    mean, median, longest = summary.step_us
    yield f"From launch to launch: mean {_ms(mean)} ms, median {_ms(median)} ms, longest {_ms(longest)} ms"
    devices = "the device" if summary.num_devices == 1 else f"one of {summary.num_devices} devices"
    yield f"Busy: {devices} {summary.busy:.1%} of the time"
    yield ""
    yield from _table("host", summary.host, summary)
    yield ""
    yield from _table("device", summary.ops, summary)
    yield ""
    yield "Longest gaps of the device:" if summary.gaps else "The device had no gap."
    for gap in summary.gaps:
        yield f"  {_ms(gap.us)} ms at {_ms(gap.begin_us)} ms, step {gap.step}: {_shares(gap.host)}"
        if gap.inside:
            yield f"      inside: {_shares(gap.inside)}"


def _table(what: str, stages: Sequence[Stage], summary: Summary) -> Iterator[str]:
    yield f"{what:<40} {'count':>6} {'ms/step':>9} {'longest':>9} {'share':>7}"
    for stage in stages:
        count = str(stage.count) if stage.count else ""
        longest = _ms(stage.longest_us) if stage.count else ""
        per_step = _ms(stage.total_us / summary.num_steps)
        share = stage.total_us / summary.window_us if summary.window_us else 0.0
        yield f"{stage.name[:40]:<40} {count:>6} {per_step:>9} {longest:>9} {share:>7.1%}"


def _shares(parts: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {_ms(us)} ms" for name, us in parts) or "nothing named"


def _ms(us: float) -> str:
    return f"{us / 1000:.3f}"
