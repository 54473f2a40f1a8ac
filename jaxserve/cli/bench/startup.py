"""`jaxserve bench startup`: from the command to a ready server."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from typing import TYPE_CHECKING

import click

from jaxserve.bench.record import append_record, header
from jaxserve.cli.bench.output import output_file

if TYPE_CHECKING:
    from jaxserve.bench.startup import Start


@click.command(
    "startup",
    short_help="Time a server's start, with an empty and a full cache.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
)
@click.argument("model")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Starts with a full cache.")
@output_file
def startup(model: str, serve_options: tuple[str, ...], runs: int, output_file: str | None) -> int:
    """Time the start of `jaxserve serve MODEL`, first with an empty cache of compiled programs, then with the full one.

    Options that are not of this command are those of `serve`.
    """
    from jaxserve.bench.startup import start

    options = ["--model-path", model, *serve_options]
    warm = []
    with tempfile.TemporaryDirectory() as cache:
        for run in range(runs + 1):
            try:
                one = start(cache, options)
            except RuntimeError as error:
                raise click.ClickException(str(error)) from None
            kind = "warm" if run else "cold"
            click.echo(f"{kind}: {_line(one)}")
            if run:
                warm.append(one)
            if output_file is not None:
                told = {"model": model, "serve_options": serve_options, "cache": kind}
                append_record(output_file, {**header("startup"), **told, **dataclasses.asdict(one)})
    ready, answer, all_there = (
        statistics.median(times)
        for times in zip(*((one.ready_s, one.first_answer_s, one.fully_warm_s) for one in warm), strict=True)
    )
    click.echo(f"warm, medians: ready {ready:.1f} s, first answer {answer:.1f} s, fully warm {all_there:.1f} s")
    return 0


def _line(one: Start) -> str:
    parts = ", ".join(f"{what} {took_s:.1f}" for what, took_s in one.parts_s.items())
    return (
        f"ready {one.ready_s:.1f} s, first answer {one.first_answer_s:.1f} s, fully warm {one.fully_warm_s:.1f} s; "
        f"{one.compiles} compiled in the server ({parts})"
    )
