"""`jaxserve bench trace`: what a trace of a server's steps says."""

from __future__ import annotations

import dataclasses
import json

import click


@click.command("trace", short_help="Say where the time of traced steps went.")
@click.argument("file", type=click.Path())
@click.option("--gaps", type=click.IntRange(0), default=5, show_default=True, help="Longest gaps of the device to show.")
@click.option("--ops", type=click.IntRange(0), default=10, show_default=True, help="Operations of the device to show.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def trace(file: str, gaps: int, ops: int, as_json: bool) -> None:
    """Read the trace of a profile (a *.trace.json.gz, or a folder: the newest in it) and say where the time went: per stage of
    the host, per operation of the device, and in the gaps in which the device had nothing to do."""
    from jaxserve.bench.trace import TraceFileError, lines, read_trace, summarize

    try:
        summary = summarize(read_trace(file), gaps, ops)
    except TraceFileError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary), indent=2))
    else:
        for line in lines(summary):
            click.echo(line)
