"""`jaxserve bench serving`: load against a server, in SGLang's words, and a sweep over any of its numbers."""

from __future__ import annotations

import dataclasses
import itertools
import os
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from jaxserve.bench.serving.options import ServingOptions
from jaxserve.cli.http_client import ServerError, base_url, wait_for_server
from jaxserve.cli.options import flag, option_of, value_type

if TYPE_CHECKING:
    from jaxserve.bench.record import Record
    from jaxserve.bench.serving.target import Target
    from jaxserve.bench.serving.tokens import Tokens

_SWEPT = (int, float)  # kinds of options that a sweep goes through


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    hints = typing.get_type_hints(ServingOptions)
    for field in reversed(dataclasses.fields(ServingOptions)):
        command = option_of(field, hints[field.name], field.default)(command)
    return command


@click.command("serving", short_help="Load a server: throughput and latencies.")
@_options
@click.option(
    "--sweep", multiple=True, help="A run for each value of an option: request-rate=1,2,4. Of several, for all combinations."
)
def serving(sweep: tuple[str, ...], **given: Any) -> int:
    """Send prompts to a server that runs, ours or another with SGLang's or OpenAI's API, and tell how fast it answers.

    \b
      jaxserve bench serving --num-prompts 100 --random-input-len 256 --random-output-len 64
      jaxserve bench serving --request-rate 4 --goodput ttft:200,tpot:30 --output-file runs.jsonl
      jaxserve bench serving --sweep max-concurrency=1,4,16 --num-prompts 64
    """
    from jaxserve.bench.record import check_writable
    from jaxserve.bench.serving.report import sweep_table
    from jaxserve.bench.serving.target import Target

    given["api_key"] = given["api_key"] or os.environ.get("JAXSERVE_API_KEY")
    names, points = sweep_points(sweep)
    # Prompts of their own for each run, or the second would find those of the first in the prefix cache.
    own_seed = [{} if given["flush_cache"] else {"seed": given["seed"] + number} for number in range(len(points))]
    runs = [(values, _checked(given | seed | changes)) for seed, (values, changes) in zip(own_seed, points, strict=True)]
    options = runs[0][1]
    if options.output_file:
        check_writable(options.output_file)
    try:
        base = base_url(options.address)
        served = wait_for_server(base, options.api_key, _say)
    except ServerError as error:
        raise click.ClickException(str(error)) from None
    target = Target(base, options.headers)
    _check_model(options, target)
    tokens = _tokens(options, target)
    done: list[tuple[tuple[str, ...], Record]] = []
    for values, one in runs:
        if names:
            _say(", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)))
        done.append((values, _run(one, target, served, tokens)))
        if done[-1][1]["interrupted"]:
            break
    if names:
        click.echo("\n".join(sweep_table(names, done)))
    if done[-1][1]["interrupted"]:
        raise click.Abort
    if not all(record["completed"] for _, record in done):
        raise click.ClickException("No request went well: there is nothing to measure. The failures are listed above.")
    return 0


def _say(line: str) -> None:
    click.echo(line, err=True)


def _checked(given: dict[str, Any]) -> ServingOptions:
    try:
        return ServingOptions(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def sweep_points(sweep: Sequence[str]) -> tuple[list[str], list[tuple[tuple[str, ...], dict[str, Any]]]]:
    """The options that are swept, and for each run their values as they were written and as changes of the options."""
    hints = typing.get_type_hints(ServingOptions)
    kinds = {name: value_type(hint) for name, hint in hints.items() if value_type(hint) in _SWEPT}
    names: list[str] = []
    values: list[list[tuple[str, Any]]] = []
    for text in sweep:
        name, _, listed = text.removeprefix("--").partition("=")
        field = name.replace("-", "_")
        if field not in kinds:
            raise click.UsageError(f"--sweep is OPTION=VALUE,VALUE,... of an option that is a number; got {text!r}.")
        if flag(field) in names:
            raise click.UsageError(f"--sweep names {flag(field)} twice.")
        try:
            values.append([(one.strip(), kinds[field](one)) for one in listed.split(",")])
        except ValueError:
            raise click.UsageError(f"--sweep {text}: these are no values of {flag(field)}.") from None
        names.append(flag(field))
    fields = [name.removeprefix("--").replace("-", "_") for name in names]
    combinations = itertools.product(*values)
    return [name.removeprefix("--") for name in names], [
        (tuple(text for text, _ in one), dict(zip(fields, (value for _, value in one), strict=True))) for one in combinations
    ]


def _check_model(options: ServingOptions, target: Target) -> None:
    names = target.model_names()
    if options.model and names and options.model not in names:
        raise click.ClickException(f"The server has no model {options.model!r}; it serves {', '.join(names)}.")


def _tokens(options: ServingOptions, target: Target) -> Tokens:
    from jaxserve.bench.serving.tokens import Tokens

    name = options.tokenizer or target.tokenizer_name()
    if name is None:
        raise click.UsageError("The server's tokenizer is not on this machine; name one with --tokenizer.")
    try:
        return Tokens.load(name)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _run(options: ServingOptions, target: Target, served: str, tokens: Tokens) -> Record:
    """One run: told, saved, and returned."""
    from jaxserve.bench.record import append_record
    from jaxserve.bench.serving.clients import ClientError
    from jaxserve.bench.serving.datasets import make_tasks
    from jaxserve.bench.serving.report import lines
    from jaxserve.bench.serving.run import RunError, client_warnings, run_serving

    try:
        tasks = make_tasks(options, tokens)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if len(tasks) < options.num_prompts and options.dataset_path:
        _say(f"{options.dataset_path} has {len(tasks)} prompts that can be sent, not {options.num_prompts}.")
    try:
        record = run_serving(options, target, served, tokens, tasks, _say)
    except (RunError, ClientError) as error:
        raise click.ClickException(str(error)) from None
    click.echo("\n".join(lines(record)))
    for warning in client_warnings(record["client"]):
        _say(f"Warning: {warning}")
    if options.output_file:
        append_record(options.output_file, record)
    return record
