"""`jaxserve bench`: how fast something is. One file per command."""

from __future__ import annotations

import click

from jaxserve.cli.lazy_group import LazyGroup

_COMMANDS = (
    "serving",
    "offline",
    "latency",
    "startup",
    "scheduler",
    "simulate",
    "kernels",
    "compare",
    "plot",
    "trace",
    "replay",
)


@click.group(
    cls=LazyGroup,
    places={name: f"jaxserve.cli.bench.{name}:{name}" for name in _COMMANDS},
    short_help="Measure a server, or this machine.",
)
def bench() -> None:
    """Measure a server, an engine, or this machine."""
