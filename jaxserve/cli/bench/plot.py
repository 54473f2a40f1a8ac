"""`jaxserve bench plot`: pictures of what bench serving wrote."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("plot", short_help="Draw pictures of serving measurements.")
@click.argument("files", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the pictures.")
@click.option("--format", "kind", type=click.Choice(("svg", "png")), default="svg", show_default=True, help="Of the files.")
def plot(files: tuple[Path, ...], out: Path, kind: str) -> int:
    """Draw what `bench serving --output-file` wrote: FILES with a run, or with a sweep.

    latency_cdf: which share of requests was answered how fast (records with --output-details). throughput_latency: the runs of
    a sweep, or of several files. timeline: running and waiting requests and the KV cache's use. Needs matplotlib
    (pip install 'jaxserve[plots]'). The same records give the same bytes.
    """
    try:
        from jaxserve.bench.plots import load_runs, pictures, save
    except ImportError as error:
        raise click.ClickException(f"Pictures need matplotlib, pip install 'jaxserve[plots]' ({error}).") from None
    out.mkdir(parents=True, exist_ok=True)
    try:
        runs = load_runs(files)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    drawn = 0
    for picture in pictures(runs):
        path = out / f"{picture.name}.{kind}"
        save(picture.figure, path)
        click.echo(path)
        drawn += 1
    if not drawn:
        raise click.ClickException("One run, without details and without a time line: nothing to draw (--output-details).")
    return 0
