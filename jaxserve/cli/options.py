"""Command line options made from the fields of ServerArgs: name, type, default, help and choices stand there alone.

`model_path` becomes --model-path; a True/False field becomes a switch (or a pair of switches where the default is True); a
tuple of numbers is written with commas.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from jaxserve.cli.config_file import ConfigFile
from jaxserve.config import ALIASES, METRIC_BUCKETS, ServerArgs

F = TypeVar("F", bound=Callable[..., Any])

# Options of the HTTP server, of no meaning to a command that runs a model in its own terminal.
HTTP_ONLY = frozenset(
    ("served_model_name", "host", "port", "fastapi_root_path", "api_key", "api_key_file", "admin_api_key", "admin_api_key_file",
     "allowed_origins", "limit_concurrency", "ssl_keyfile", "ssl_certfile", "max_body_size_mb", "log_level_http",
     "uvicorn_access_log_exclude_prefixes", "log_requests", "log_requests_level", "log_requests_format",
     "log_requests_target", "crash_dump_folder", "profile_dir", "enable_trace", "otlp_traces_endpoint",
     "ssl_ca_certs", "ssl_keyfile_password", "enable_ssl_refresh",
     "enable_cache_report", "stream_response_default_include_usage", "skip_tokenizer_init",
     "incremental_streaming_output", "shutdown_timeout_s", "preferred_sampling_params", "enable_metrics",
     "extra_metric_labels", "tokenizer_metrics_allowed_custom_labels", "tokenizer_metrics_custom_labels_header",
     *METRIC_BUCKETS)
)  # fmt: skip


class ListOf(click.ParamType):
    """Numbers, or words, with commas between them."""

    def __init__(self, kind: type[int] | type[float] | type[str]) -> None:
        self._kind = kind
        self.name = {int: "int,int,...", float: "number,number,...", str: "text,text,..."}[kind]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._kind(part.strip()) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 16,64,256.", param, ctx)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def spellings(name: str) -> list[str]:
    """An option under its own name, then under its others."""
    return [flag(name), *(flag(alias) for alias, known in ALIASES.items() if known == name)]


def server_options(without: Collection[str] = (), defaults: Mapping[str, Any] | None = None) -> Callable[[F], F]:
    """A decorator that adds an option for every ServerArgs field but those named; `defaults` replace those of the fields."""
    hints = typing.get_type_hints(ServerArgs)
    options = [
        option_of(field, hints[field.name], (defaults or {}).get(field.name, _default(field)))
        for field in dataclasses.fields(ServerArgs)
        if field.name not in without
    ]

    help_text = "YAML file of options (page-size: 64); what the command line says wins."
    config = ConfigFile(without)
    options.append(click.option("--config", type=config, multiple=True, is_eager=True, expose_value=False, help=help_text))

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING, f"ServerArgs.{field.name} has no default"
    return field.default_factory()


def option_of(field: dataclasses.Field[Any], hint: Any, default: Any) -> Callable[[F], F]:
    """One field's option; its `metadata` has help, choices and, where each use adds a value to a tuple, `repeated`."""
    name, help_text = flag(field.name), field.metadata["help"]
    if field.metadata.get("repeated"):
        return click.option(name, field.name, multiple=True, help=help_text)
    kind = value_type(hint)
    if kind is bool:
        spelling = f"{name}/--no-{name[2:]}" if default else name
        return click.option(spelling, field.name, is_flag=True, default=default, show_default=bool(default), help=help_text)
    choices = field.metadata["choices"]
    click_type = click.Choice(choices) if choices else kind
    # "" and None say nothing in a help page; the help text says what they mean.
    shown = default not in (None, "")
    names = spellings(field.name)
    return click.option(*names, field.name, type=click_type, default=default, show_default=shown, help=help_text)


def value_type(hint: Any) -> Any:
    """The type to parse a value to: X for X | None, ListOf for tuples."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = _without_none(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        kind, _ = typing.get_args(hint)
        assert kind in (int, float, str), f"no command line form for {hint}"
        return ListOf(kind)
    assert hint in (str, int, float, bool), f"no command line form for {hint}"
    return hint


def _without_none(args: Iterable[Any]) -> list[Any]:
    return [one for one in args if one is not type(None)]


def server_args(options: dict[str, Any], model: str | None = None) -> ServerArgs:
    """Checked ServerArgs. Raises click.UsageError with a sentence for the terminal."""
    options = {**options, "model_path": one_model(model, options["model_path"])}
    try:
        return ServerArgs(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def one_model(model: str | None, model_path: str) -> str:
    """The model, named as an argument, with --model-path or in a file. Raises click.UsageError unless there is just one."""
    context = click.get_current_context(silent=True)
    source = context.get_parameter_source("model_path") if context else None
    if model is not None and source is not ParameterSource.DEFAULT_MAP and model_path not in ("", model):
        raise click.UsageError(f"Two models are named: {model!r} and --model-path {model_path!r}.")
    if not (model or model_path):
        raise click.UsageError("A model is needed: a folder, a name on the Hugging Face Hub, or demo, the built-in model.")
    return model or model_path
