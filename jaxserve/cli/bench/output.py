"""--output-file of the bench commands: whether it can be written is known before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from jaxserve.bench.record import check_writable

F = TypeVar("F", bound=Callable[..., Any])


def _checked(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        check_writable(path)
    return path


def output_file(command: F) -> F:
    """Adds the option; a path that cannot be written to is an OSError, which `cli.main` puts in a line."""
    help_text = "File to which one line of JSON is appended for each measurement."
    kind = click.Path(dir_okay=False)
    return click.option("--output-file", type=kind, callback=_checked, help=help_text)(command)
