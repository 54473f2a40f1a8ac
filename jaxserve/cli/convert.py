"""`jaxserve convert`: a checkpoint written anew, in another type or in the form that loads fastest."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.options import one_model
from jaxserve.config import DTYPES


@click.command(short_help="Rewrite a checkpoint for faster loading.")
@click.argument("model", required=False)
@click.option("--model-path", default="", help="The checkpoint to read; the same as MODEL.")
@click.option(
    "--output", "-o", required=True, type=click.Path(file_okay=False), help="Folder to write; it must be new or empty."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the weights.")
def convert(model: str | None, model_path: str, output: str, dtype: str) -> int:
    """Read a Hugging Face checkpoint and write it as an Orbax checkpoint, with its tokenizer and config beside it.

    What fails leaves nothing behind.
    """
    source, folder = one_model(model, model_path), Path(output)
    if folder.is_dir() and any(folder.iterdir()):
        raise click.UsageError(f"--output {output!r} is not empty.")
    from jaxserve.models import convert as convert_checkpoint
    from jaxserve.models import model_folder

    _hush()
    try:
        convert_checkpoint(model_folder(source), output, dtype)
    except (ValueError, NotImplementedError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Written to {output}; serve it with: jaxserve serve {output}")
    return 0


def _hush() -> None:
    """Orbax logs tracebacks of what it raises anyway, and TensorStore's threads print theirs when an event loop of Orbax's has
    gone that they were to tell. For a process that is ours from start to end."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
