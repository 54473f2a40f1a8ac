"""`jaxserve bench compare`: two files of measurements, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jaxserve.bench.comparing import Comparison, Pairing
    from jaxserve.bench.record import Record

_BASES = {
    "runs": "Intervals hold for repeated runs like these.",
    "requests": "Intervals hold for other requests in the same two runs; runs differ, too: repeat them to see how much.",
    "rounds": "Intervals hold for other rounds in the same two runs; runs differ, too: repeat them to see how much.",
}


class _Share(click.ParamType):
    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            share = float(str(value).removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < float("inf"):
            self.fail(f"{value!r} is not a share such as 5%.", param, ctx)
        return share


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("compare", short_help="Compare two files of measurements.")
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option("--metric", "metrics", multiple=True, help="Only this number, by its key (output_throughput); may be repeated.")
@click.option("--fail-if-slower", type=_Share(), help="Exit with 1 if a number of AFTER is slower by more than this: 5%.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(before: Path, after: Path, metrics: tuple[str, ...], fail_if_slower: float | None, as_json: bool) -> int:
    """Compare what bench commands wrote with --output-file: BEFORE and AFTER, run by run of the same load.

    A number is faster or slower if the 95 % interval of its ratio leaves 1 out. Intervals are over repeated runs where both
    files have several of a load, else over requests where files have details (--output-details). With --fail-if-slower, a
    number without an interval is judged by its ratio.
    """
    from jaxserve.bench.comparing import compare as compare_pair
    from jaxserve.bench.comparing import load_records, pair_up

    try:
        records = load_records(before), load_records(after)
        pairing = pair_up(*records)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    found = [_chosen(list(compare_pair(pair)), metrics) for pair in pairing.pairs]
    if not any(found):
        raise click.ClickException("No number is in both files" + (f": {', '.join(metrics)}." if metrics else "."))
    if as_json:
        click.echo(json.dumps(_as_json(pairing, found), indent=2))
    else:
        _print(before, after, pairing, found)
        _warn(before, records[0])
        _warn(after, records[1])
    if fail_if_slower is None:
        return 0
    slower = [one for group in found for one in group if _fails(one, fail_if_slower)]
    if slower:
        said = ", ".join(f"{one.metric.label} by {one.slower_by:.1%}" for one in slower)
        raise click.ClickException(f"Slower by more than {100 * fail_if_slower:g} %: {said}.")
    return 0


def _chosen(comparisons: list[Comparison], metrics: tuple[str, ...]) -> list[Comparison]:
    return [one for one in comparisons if not metrics or one.metric.key in metrics]


def _fails(one: Comparison, share: float) -> bool:
    from jaxserve.bench.comparing import Verdict

    return one.verdict in (Verdict.SLOWER, Verdict.UNKNOWN) and one.slower_by > share


def _print(before: Path, after: Path, pairing: Pairing, found: list[list[Comparison]]) -> None:
    click.echo(f"A: {before}\nB: {after}")
    if pairing.differences:
        click.echo("What differs beside the numbers (A, B):")
        for name, *values in pairing.differences:
            click.echo(f"  {name}: {', '.join(values)}")
    for line in pairing.alone:
        click.echo(f"Not compared: {line}.")
    for pair, group in zip(pairing.pairs, found, strict=True):
        click.echo(f"\n{pair.title}\n{len(pair.before)} and {len(pair.after)} runs")
        click.echo(f"{'':<20} {'A':>10} {'B':>10} {'':<5} {'B/A':>7}   95 % interval")
        for one in group:
            click.echo(_line(one))
    for basis in dict.fromkeys(one.basis for group in found for one in group if one.basis):
        click.echo(f"\n{_BASES[basis]}")


def _line(one: Comparison) -> str:
    interval = f"{one.interval.low:.3f} to {one.interval.high:.3f} ({one.basis})" if one.interval else "-"
    is_short = one.metric.unit == "s" and max(one.before, one.after) < 1
    factor, unit = (1e3, "ms") if is_short else (1.0, one.metric.unit)
    numbers = f"{_short(factor * one.before):>10} {_short(factor * one.after):>10} {unit:<5} {one.ratio:>7.3f}"
    return f"{one.metric.label:<20} {numbers}   {interval:<26} {one.verdict.value}"


def _short(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _warn(path: Path, records: list[Record]) -> None:
    failed = sum(int(record.get("failed") or 0) for record in records)
    if failed:
        click.echo(f"{path}: {failed} requests failed; latencies are those of the others.", err=True)
    if any(record.get("interrupted") for record in records):
        click.echo(f"{path}: a run was interrupted.", err=True)


def _as_json(pairing: Pairing, found: list[list[Comparison]]) -> dict[str, Any]:
    return {
        "differences": [{"name": name, "before": one, "after": other} for name, one, other in pairing.differences],
        "not_compared": pairing.alone,
        "loads": [
            {"load": dict(pair.load), "runs": [len(pair.before), len(pair.after)],
             "metrics": [_metric_json(one) for one in group]}
            for pair, group in zip(pairing.pairs, found, strict=True)
        ],
    }  # fmt: skip


def _metric_json(one: Comparison) -> dict[str, Any]:
    interval = [one.interval.low, one.interval.high] if one.interval else None
    return {
        "metric": one.metric.key, "before": one.before, "after": one.after, "ratio": one.ratio, "interval": interval,
        "basis": one.basis or None, "verdict": one.verdict.value,
    }  # fmt: skip
