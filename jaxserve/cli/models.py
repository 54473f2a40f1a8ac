"""`jaxserve models`: every architecture with how it was tested and what serves it, or what one config.json is read as."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import click

from jaxserve.models import ModelConfig, families, model_folder
from jaxserve.models.families.catalogue import Entry, catalogue

if TYPE_CHECKING:
    from jaxserve.aot.footprint import Footprint
    from jaxserve.models import LayerSpec

_RULES = """
parity   whose logits, tokens and logprobs its own equal, in float32; rewritten: a relative's checkpoint in this one's form
by       how that was asked: of a server, of scheduler and runner, of the logits alone; on 1, 2 and 4 devices.
         of encoders hidden states are compared, on 1 and 2 devices
kernels  the attention backend that is chosen on GPU / TPU / CPU, for usual heads
Every architecture takes --quantization int8wo. --tp-size must divide query heads, MLP columns and experts."""


@click.command("models", short_help="List the architectures, or say what a config.json is read as.")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(model: str | None, as_json: bool) -> None:
    """List the architectures that are served: how each was tested, what it is made of, which kernels serve it.

    With MODEL, a folder with a config.json or a name on the Hugging Face Hub: what that is read as, and what it takes. Weights
    are not read, and need not be there.
    """
    if model is not None:
        _describe(model, as_json)
        return
    entries = {family.architecture: catalogue().get(family.architecture) for family in families()}
    if as_json:
        click.echo(json.dumps({name: entry and _entry_json(entry) for name, entry in entries.items()}, indent=2))
        return
    rows: list[tuple[str, ...]] = [("architecture", "parity", "by", "kernels", "made of")]
    rows += [_row(name, entry) for name, entry in entries.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(_RULES)


def _row(name: str, entry: Entry | None) -> tuple[str, ...]:
    if entry is None:
        return name, "not tested", "", "", ""
    parity = f"{entry.oracle}, rewritten" if entry.is_rewritten else "its own class" if entry.oracle == name else entry.oracle
    kernels = "/".join(entry.kernels.values())
    return name, parity, ", ".join(entry.served), kernels, ", ".join(entry.made_of)


def _entry_json(entry: Entry) -> dict[str, Any]:
    fields = dataclasses.asdict(entry)
    del fields["keys"]
    return fields


def _describe(model: str, as_json: bool) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # only shapes are asked for
    from jaxserve.aot.footprint import Footprint

    try:
        config = ModelConfig.from_pretrained(model_folder(model, weights=False))
        found = Footprint.of(config, "bfloat16")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        groups = [{"window": window, "bytes": size} for window, size in found.kv_token_bytes.items()]
        fields = {**dataclasses.asdict(found), "kv_token_bytes": groups}
        read_as = {"architecture": config.architecture, "context_len": config.context_len, "num_layers": config.num_layers}
        click.echo(json.dumps({**read_as, "layers": [_layer_text(layer) for layer in config.layers], **fields}, indent=2))
        return
    click.echo("\n".join(f"{name:<14}{value}" for name, value in _lines(config, found)))


def _lines(config: ModelConfig, found: Footprint) -> list[tuple[str, str]]:
    lines = [("read as", f"{config.architecture}, at most {config.context_len:,} tokens, vocabulary {config.vocab_size:,}")]
    first = 0
    for text, group in itertools.groupby(map(_layer_text, config.layers)):
        last = first + len(list(group)) - 1
        lines.append((f"layer{'s' if last > first else ''} {first}" + (f"-{last}" if last > first else ""), text))
        first = last + 1
    lines.append(("parameters", f"{found.parameters:,}, {found.weight_bytes / 2**30:.2f} GiB in bfloat16"))
    lines += [
        ("KV cache", f"{size:,} bytes per token in bfloat16" + ("" if window is None else f", of the last {window:,} tokens"))
        for window, size in found.kv_token_bytes.items()
    ]
    if found.state_bytes:
        lines.append(("states", f"{found.state_bytes:,} bytes per request in bfloat16"))
    return [*lines, ("--tp-size", ", ".join(map(str, found.tp_sizes)))]


def _layer_text(layer: LayerSpec) -> str:
    """The fields of mixer and MLP that are plain and not as usual."""
    return f"{_part_text(layer.mixer)}; {_part_text(layer.mlp)}"


def _part_text(part: Any) -> str:
    words = [type(part).__name__.removesuffix("Spec")]
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        is_told = isinstance(value, int | float | str) and value != field.default
        words += [f"{field.name}={value:.6g}" if isinstance(value, float) else f"{field.name}={value}"] if is_told else []
    return " ".join(words)
