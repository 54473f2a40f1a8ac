"""`jaxserve generate`: one prompt, answered in the terminal without a server."""

from __future__ import annotations

import sys
from typing import Any

import click

from jaxserve.cli.engine import start_engine, stream_text
from jaxserve.cli.options import HTTP_ONLY, server_options
from jaxserve.cli.sampling import sampling_options, take_sampling


@click.command(short_help="Complete one prompt in the terminal.")
@click.argument("prompt", required=False)
@sampling_options
@server_options(without=HTTP_ONLY, defaults={"log_level": "warning"})
def generate(prompt: str | None, **options: Any) -> int:
    """Complete PROMPT (or what stands on standard input) and print the text as it comes.

    The text goes to standard output, everything else to standard error.
    """
    sampling = take_sampling(options)
    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("A prompt is needed, as an argument or on standard input.")
        prompt = sys.stdin.read()
    with start_engine(options) as engine:
        for text in stream_text(engine, sampling, prompt=prompt):
            click.echo(text, nl=False)
    click.echo()
    return 0
