"""`jaxserve bench kernels`: the attention kernels of the machine at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jaxserve.bench.kernels import Kernels, Measured
    from jaxserve.bench.shapes import Shape


@click.command("kernels", short_help="Time the attention kernels, or tune them.")
@click.option("--model-path", help="Take the shapes of this model.")
@click.option("--tp-size", type=click.IntRange(1), default=1, show_default=True, help="Devices that share the heads.")
@click.option("--page-size", type=click.IntRange(1), help="Tokens per KV page; by default 64 on a GPU, 128 on a TPU.")
@click.option(
    "--kv-dtype",
    type=click.Choice(("auto", "bfloat16", "float16", "float8_e4m3fn", "int8")),
    default="auto",
    show_default=True,
    help="Type of the stored keys and values; auto: the model's.",
)
@click.option("--tune", is_flag=True, help="Try a grid of configs for each kernel and keep the fastest.")
@click.option("--out", type=click.Path(dir_okay=False), help="JSON file: the times, or with --tune a tuning table.")
def kernels(model_path: str | None, tp_size: int, page_size: int | None, kv_dtype: str, tune: bool, out: str | None) -> int:
    """Time the attention kernels of this machine's GPU or TPU, with cold caches.

    With --tune, the file given with --out holds the fastest configs; JAXSERVE_TUNING_FILE=FILE makes jaxserve use them.
    """
    from jaxserve.bench import kernels as bench_kernels

    try:
        here = bench_kernels.kernels_here()
    except ValueError as error:
        raise click.ClickException(f"The attention kernels cannot run here: {error}") from error
    shapes = _shapes(here, model_path, tp_size, page_size or here.default_page_size, kv_dtype)
    reasons = [here.unsupported(shape) for shape in shapes]
    if None not in reasons:
        raise click.ClickException(f"The attention kernels cannot run here: {reasons[0]}")
    measured = []
    for one in bench_kernels.measure(here, shapes, tune=tune):
        measured.append(one)
        click.echo(_line(one))
    if out is not None:
        _write(out, measured, tune)
    return 0 if any(one.us for one in measured) else 1


def _shapes(here: Kernels, model_path: str | None, tp_size: int, page_size: int, kv_dtype: str) -> list[Shape]:
    from jaxserve.bench.shapes import Shape

    if model_path is None:
        return [Shape(page_size=page_size, kv_dtype="bfloat16" if kv_dtype == "auto" else kv_dtype)]
    from jaxserve.models import ModelConfig, model_folder

    try:
        config = ModelConfig.from_pretrained(model_folder(model_path, weights=False))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    return Shape.of_model(config, here, tp_size=tp_size, page_size=page_size, kv_dtype=kv_dtype)


def _line(one: Measured) -> str:
    changes = ", ".join(f"{name}={value}" for name, value in one.changes.items()) or "default"
    return f"{one.key}  {changes}: {one.reason or ' '.join(f'{us:.1f}' for us in one.us) + ' µs'}"


def _write(path: str, measured: list[Measured], tune: bool) -> None:
    import jax

    from jaxserve.bench.kernels import best_table

    kind = jax.devices()[0].device_kind
    times: Any = [{"shape": one.key, "us": one.us, "reason": one.reason} for one in measured]
    content = best_table(kind, measured) if tune else {"device": kind, "jax": jax.__version__, "kernels": times}
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    click.echo(f"Written to {path}" + (f"; use it with JAXSERVE_TUNING_FILE={path}" if tune else ""))
