"""`jaxserve convert`: a checkpoint written anew, in another type or in the form that loads fastest."""

from __future__ import annotations

from pathlib import Path

import click

from jaxserve.config import DTYPES


@click.command(short_help="Rewrite a checkpoint for faster loading.")
@click.option("--model-path", required=True, type=click.Path(exists=True, file_okay=False), help="The checkpoint to read.")
@click.option(
    "--output", "-o", required=True, type=click.Path(file_okay=False), help="Folder to write; it must be new or empty."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the weights.")
def convert(model_path: str, output: str, dtype: str) -> int:
    """Read a Hugging Face checkpoint and write it as an Orbax checkpoint, with its tokenizer and config beside it."""
    folder = Path(output)
    if folder.is_dir() and any(folder.iterdir()):
        raise click.UsageError(f"--output {output!r} is not empty.")
    from jaxserve.models import convert as convert_checkpoint

    try:
        convert_checkpoint(model_path, output, dtype)
    except (ValueError, OSError, NotImplementedError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Written to {output}; serve it with: jaxserve serve --model-path {output}")
    return 0
