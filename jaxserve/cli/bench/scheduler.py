"""`jaxserve bench scheduler`: what the scheduler costs the host for each step."""

from __future__ import annotations

import dataclasses
import itertools

import click

from jaxserve.bench.record import append_record, header
from jaxserve.cli.bench.output import output_file
from jaxserve.cli.options import ListOf

_COLUMNS = ("schedule", "launch", "process", "total", "p99", "admit 1")


@click.command("scheduler", short_help="Time the scheduler's own work for a decode step.")
@click.option("--running", type=click.IntRange(1), default=256, show_default=True, help="Running requests.")
@click.option("--steps", type=click.IntRange(1), default=2000, show_default=True, help="Decode steps to measure.")
@click.option(
    "--page-size", type=ListOf(int), default=(1, 16), show_default="1,16", help="Tokens per KV page; several with commas."
)
@output_file
def scheduler(running: int, steps: int, page_size: tuple[int, ...], output_file: str | None) -> int:
    """Time what the host does for a decode step, without a model: scheduling, preparing the launch, processing the result.

    Microseconds of CPU time, medians over the steps; `admit 1` is what taking in one of the prompts costs.
    """
    from jaxserve.bench.scheduler import measure
    from jaxserve.progress import progress_bar

    if min(page_size) < 1:
        raise click.BadParameter(f"{min(page_size)} is less than 1.", param_hint="--page-size")
    click.echo(f"{running} running requests, microseconds per decode step")
    click.echo(f"{'page_size':>9} {'stream':>6} " + " ".join(f"{name:>9}" for name in _COLUMNS))
    for size, stream in itertools.product(page_size, (True, False)):
        with progress_bar(steps, f"page size {size}", "step") as progress:
            cost = measure(running, steps, size, stream=stream, on_step=progress.update)
        _, _, _, *numbers = dataclasses.astuple(cost)
        click.echo(f"{size:>9} {stream!s:>6} " + " ".join(f"{number:>9.0f}" for number in numbers))
        if output_file is not None:
            append_record(output_file, {**header("scheduler"), "num_steps": steps, **dataclasses.asdict(cost)})
    return 0
