"""`jaxserve bench`: how fast something is. One file per command; each imports what it needs when it runs."""

from __future__ import annotations

import click

from jaxserve.cli.bench.compare import compare
from jaxserve.cli.bench.kernels import kernels
from jaxserve.cli.bench.latency import latency
from jaxserve.cli.bench.offline import offline
from jaxserve.cli.bench.plot import plot
from jaxserve.cli.bench.replay import replay
from jaxserve.cli.bench.scheduler import scheduler
from jaxserve.cli.bench.serving import serving
from jaxserve.cli.bench.startup import startup
from jaxserve.cli.bench.trace import trace


@click.group(short_help="Measure a server, or this machine.")
def bench() -> None:
    """Measure a server, an engine, or this machine."""


for command in (serving, offline, latency, startup, scheduler, kernels, compare, plot, trace, replay):
    bench.add_command(command)
